"""The page between a supervisor and a rank: orders arrive whole, and no bytes of a rank's confuse or kill its reader."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkb_env.box import control
from pkb_env.box.control import Order, Page, Status


@pytest.fixture
def fd() -> Iterator[int]:
    fd = control.create(3)
    yield fd
    os.close(fd)


def test_an_order_arrives_at_its_rank_only(fd: int) -> None:
    pages = [Page(fd, rank) for rank in range(3)]
    order = Order(control.FILL, 3, (1 << 63) + 5, 1007, bytes(range(32)))
    pages[1].put(order)
    assert Page(fd, 1).order() == order
    for other in (0, 2):
        assert Page(fd, other).order() == Order(0, secret=bytes(32))
    pages[1].put(Order(control.CALL, 1, 2))
    assert Page(fd, 1).order() == Order(control.CALL, 1, 2, secret=bytes(32))  # nothing of the last one is left


def test_status_tells_phase_and_collective(fd: int) -> None:
    rank, reader = Page(fd, 2), Page(fd, 2)
    assert reader.status() == Status("start", 0, "", inside=False)
    for phase in control.PHASES:
        rank.enter(phase)
        assert reader.status().phase == phase
    rank.enter("call")
    assert rank.begin("all_reduce") == 1
    assert reader.status() == Status("call", 1, "all_reduce", inside=True)
    rank.end()
    assert reader.status() == Status("call", 1, "all_reduce", inside=False)
    assert rank.begin("barrier") == 2
    rank.end()
    rank.await_(1, "all_reduce")
    assert reader.status() == Status("call", 1, "wait for all_reduce", inside=True)
    rank.end()
    assert rank.begin("reduce") == 3
    rank.enter("raised")
    assert reader.status() == Status("raised", 3, "reduce", inside=True)
    assert Page(fd, 1).status() == Status("start", 0, "", inside=False)


def test_long_names_are_cut_and_a_page_has_no_overlap(fd: int) -> None:
    rank, reader = Page(fd, 0), Page(fd, 0)
    rank.put(Order(1, 2, 3, 4, b"\xff" * 32))
    rank.begin("x" * 500)
    assert reader.status().collective == "x" * 47
    assert reader.order() == Order(1, 2, 3, 4, b"\xff" * 32)
    assert reader.wait_record() == bytes(64)


@given(st.binary(min_size=56, max_size=56))
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_a_status_of_plain_words(data: bytes) -> None:
    fd = control.create(1)
    page = Page(fd, 0)
    page._map[2048 : 2048 + 56] = data  # noqa: SLF001  a rank writes there without asking
    status = page.status()
    assert status.phase in (*control.PHASES, "unknown")
    assert all(c.isascii() and (c.isalnum() or c in "_. ?") for c in status.collective)
    assert len(status.collective) < 48
    os.close(fd)


def test_terminal_codes_do_not_get_through(fd: int) -> None:
    page = Page(fd, 0)
    struct.pack_into("<II48s", page._map, 2048, 99, 7, b">\x1b[2Jrank 0\nis fine\xff")  # noqa: SLF001
    assert page.status() == Status("unknown", 7, "??2Jrank 0?is fine?", inside=True)


def test_no_rank_can_shrink_the_page_under_its_reader(fd: int) -> None:
    for length in (0, 1, 1 << 20):
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(fd, length)
    assert Page(fd, 2).status().phase == "start"


def test_the_wait_record_lies_where_symmetric_memory_writes(fd: int) -> None:
    rank = Page(fd, 1)
    ctypes.memmove(rank.wait_address, b"w" * 64, 64)
    assert Page(fd, 1).wait_record() == b"w" * 64
    assert Page(fd, 2).wait_record() == bytes(64)
    rank.begin("all_reduce")
    assert Page(fd, 1).wait_record() == b"w" * 64
