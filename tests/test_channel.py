"""Messages arrive whole, with their own descriptors, whatever the writer does; nothing leaks, nothing blocks."""

from __future__ import annotations

import array
import contextlib
import json
import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkb_env.box.channel import MAX_FDS, MAX_MESSAGE, Channel, ChannelClosed, ChannelViolation, Message

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8,
)  # fmt: skip


def _open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    before = _open_fds()
    yield
    assert _open_fds() == before


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A reader and the raw socket of a hostile writer."""
    ours, theirs = Channel.pair()
    reader = Channel(ours)
    yield reader, theirs
    theirs.close()
    reader.close()


@contextlib.contextmanager
def channels() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = map(Channel, Channel.pair())
    try:
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()


def frame(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def with_fds(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


@given(st.lists(st.dictionaries(st.text(), JSON, max_size=4), min_size=1, max_size=5))
@settings(max_examples=80, deadline=None)
def test_round_trip(bodies: list[dict[str, object]]) -> None:
    with channels() as (ours, theirs):
        for body in bodies:
            ours.send(body)
        assert [m.body for m in theirs.pump()] == bodies
        assert theirs.pump() == []


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20))
@settings(max_examples=40, deadline=None)
def test_partial_messages_wait_for_their_rest(cuts: list[int]) -> None:
    packet, at = frame(b'{"a":1}') + frame(b'{"b":2}'), 0
    ours, theirs = Channel.pair()
    reader, got = Channel(ours), []
    for cut in [*cuts, len(packet)]:
        theirs.send(packet[at : at + cut])
        at += cut
        got += [m.body for m in reader.pump()]
    assert got == [{"a": 1}, {"b": 2}]
    theirs.close()
    reader.close()


def test_a_large_message_crosses_while_both_sides_work() -> None:
    with channels() as (ours, theirs):
        body = {"text": "x" * (MAX_MESSAGE - 100)}
        sender = threading.Thread(target=ours.send, args=(body,))
        sender.start()
        assert theirs.recv(20).body == body
        sender.join()


def test_the_writer_of_too_much_is_told() -> None:
    with channels() as (ours, theirs):
        with pytest.raises(ValueError, match="at most"):
            ours.send({"text": "x" * MAX_MESSAGE})
        with pytest.raises(ValueError, match="at most"):
            ours.send({}, [0] * (MAX_FDS + 1))
        assert theirs.pump() == []


@pytest.mark.parametrize("data", [
    frame(b"[1]"), frame(b"3"), frame(b"null"), frame(b'"x"'), frame(b""), frame(b"{"), frame(b"\xff\xfe\x00"), frame(b"{'a':1}"),
    frame(b"[" * 500_000), frame(b'{"a":' * 200_000), frame(b'{"a":' + b"9" * 5000 + b"}"), b"\xff\xff\xff\xff",
    struct.pack("<I", MAX_MESSAGE + 1),
])  # fmt: skip
def test_what_is_no_message_is_a_violation_and_the_end(ends: tuple[Channel, socket.socket], data: bytes) -> None:
    reader, writer = ends
    thread = threading.Thread(target=_send_all, args=(writer, data))
    thread.start()
    with pytest.raises(ChannelViolation):
        reader.recv(10)
    thread.join()
    with pytest.raises(ChannelClosed):
        reader.recv(1)
    with pytest.raises(ChannelClosed):
        reader.pump()


def _send_all(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(data)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_messages_a_violation_or_an_end(data: bytes) -> None:
    ours, theirs = Channel.pair()
    reader = Channel(ours)
    theirs.send(data)
    theirs.close()
    for _ in range(3):
        with contextlib.suppress(ChannelViolation, ChannelClosed):
            assert all(isinstance(m, Message) for m in reader.pump())
    reader.close()


def test_messages_before_the_garbage_are_the_writers_last() -> None:
    with channels() as (ours, theirs):
        ours.send({"good": 1})
        assert theirs.recv(1).body == {"good": 1}
        ours.sock.send(frame(b"bad"))
        with pytest.raises(ChannelViolation):
            theirs.pump()
        with pytest.raises(ChannelClosed, match="cannot send"):
            ours.send({"more": 1}, timeout=0.2)


def test_descriptors_stay_with_their_message() -> None:
    with channels() as (ours, theirs):
        files = [os.memfd_create(f"f{i}") for i in range(3)]
        ours.send({"n": 0})
        ours.send({"n": 1}, files[:2])
        ours.send({"n": 2})
        ours.send({"n": 3}, files[2:])
        ours.send({"n": 4, "text": "y" * 50_000}, files[:1])
        ours.send({"n": 5})
        messages = theirs.pump()
        assert [len(m.fds) for m in messages] == [0, 2, 0, 1, 1, 0]
        inode = [os.fstat(fd).st_ino for fd in files]
        assert [os.fstat(fd).st_ino for m in messages for fd in m.fds] == [*inode, inode[0]]
        assert not any(os.get_inheritable(fd) for m in messages for fd in m.fds)
        for fd in [*files, *(fd for m in messages for fd in m.fds)]:
            os.close(fd)


def test_many_writers_share_one_end() -> None:
    """Two threads of a starter ask the zygote at the same time: each request keeps its own descriptor."""
    with channels() as (ours, theirs):
        files = [os.memfd_create(f"f{i}") for i in range(40)]
        for fd in files:
            ours.send({"inode": os.fstat(fd).st_ino}, [fd])
        for _ in files:
            message = theirs.recv(1)
            (fd,) = message.fds
            assert os.fstat(fd).st_ino == message.body["inode"]
            os.close(fd)
        for fd in files:
            os.close(fd)


def test_the_largest_number_of_descriptors() -> None:
    with channels() as (ours, theirs):
        ours.send({}, [0] * MAX_FDS)
        (message,) = theirs.pump()
        assert len(message.fds) == MAX_FDS
        for fd in message.fds:
            os.close(fd)


def test_descriptors_without_messages_are_capped_and_closed(ends: tuple[Channel, socket.socket]) -> None:
    reader, writer = ends
    writer.send(struct.pack("<I", 1000))
    for _ in range(2):
        with_fds(writer, b"{", [0] * 250)
        assert reader.pump() == []
    with_fds(writer, b"{", [0])
    with pytest.raises(ChannelViolation, match="descriptors without their messages"):
        reader.pump()
    with pytest.raises(ChannelClosed):
        reader.pump()


def test_descriptors_of_an_unfinished_message_are_closed(ends: tuple[Channel, socket.socket]) -> None:
    reader, writer = ends
    with_fds(writer, frame(b'{"a":1}')[:-1], [0, 1, 2])
    assert reader.pump() == []
    reader.close()


def test_descriptors_of_garbage_are_closed(ends: tuple[Channel, socket.socket]) -> None:
    reader, writer = ends
    with_fds(writer, frame(b"[]"), [0, 1, 2])
    with pytest.raises(ChannelViolation):
        reader.pump()


def test_a_flood_does_not_hold_up_the_reader(ends: tuple[Channel, socket.socket]) -> None:
    reader, writer = ends
    stop = threading.Event()
    flood = frame(b'{"event":"hello"}') * 5000

    def pour() -> None:
        with contextlib.suppress(OSError):
            while not stop.is_set():
                writer.sendall(flood)

    thread = threading.Thread(target=pour)
    thread.start()
    try:
        for _ in range(3):
            assert len(reader.pump()) < 100_000
    finally:
        stop.set()
        reader.sock.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_reader_that_does_not_read_costs_the_timeout_only() -> None:
    with channels() as (ours, _):
        start = time.monotonic()
        with pytest.raises(ChannelClosed, match="does not read"):
            ours.send({"text": "x" * (4 << 20)}, timeout=0.3)
        assert 0.25 < time.monotonic() - start < 5


def test_silence_costs_the_timeout_only(ends: tuple[Channel, socket.socket]) -> None:
    reader, writer = ends
    writer.send(b"\x05\x00\x00\x00{")
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="no message within"):
        reader.recv(0.2)
    assert 0.15 < time.monotonic() - start < 5
    with pytest.raises(TimeoutError):
        reader.recv(0)


def test_what_is_there_is_read_without_waiting(ends: tuple[Channel, socket.socket]) -> None:
    reader, writer = ends
    writer.send(frame(b'{"a":1}'))
    assert reader.recv(0).body == {"a": 1}


def test_closed_ends() -> None:
    with channels() as (ours, theirs):
        theirs.send({"last": 1})
        theirs.close()
        assert ours.recv(1).body == {"last": 1}
        for read in (ours.pump, ours.recv):
            with pytest.raises(ChannelClosed):
                read()
        with pytest.raises(ChannelClosed):
            ours.send({})
        with pytest.raises(ChannelClosed):
            theirs.send({})
        with pytest.raises(ChannelClosed):
            theirs.recv(1)


def test_an_end_in_the_middle_of_a_message(ends: tuple[Channel, socket.socket]) -> None:
    reader, writer = ends
    writer.send(b"\x05\x00\x00\x00{")
    writer.close()
    with pytest.raises(ChannelClosed):
        reader.recv(1)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_the_kernel_vouches_for_the_sender() -> None:
    ours, theirs = Channel.pair()
    reader = Channel(ours, credentials=True)
    pid = os.fork()
    if pid == 0:
        Channel(theirs).send({"pid": os.getpid(), "claim": 1})
        os.kill(os.getpid(), signal.SIGKILL)
    message = reader.recv(10)
    os.waitpid(pid, 0)
    assert message.pid == message.body["pid"] == pid
    theirs.close()
    reader.close()


def test_without_credentials_nobody_is_named() -> None:
    with channels() as (ours, theirs):
        ours.send({})
        assert theirs.recv(1).pid is None


def test_descriptor_numbers_beyond_select() -> None:
    """A busy evaluator has more than 1024 files open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        pytest.skip("this machine allows no more than 1200 files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    blockers = [os.dup(0) for _ in range(1100)]
    try:
        with channels() as (ours, theirs):
            assert ours.fileno() > 1024
            with pytest.raises(ChannelClosed, match="does not read"):
                ours.send({"text": "x" * (4 << 20)}, timeout=0.1)
            with pytest.raises(TimeoutError):
                ours.recv(0.05)
            assert theirs.fileno() > 1024
    finally:
        for fd in blockers:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_messages_are_json_on_the_wire(ends: tuple[Channel, socket.socket]) -> None:
    reader, writer = ends
    reader.send({"a": [1, None]})
    data = writer.recv(100)
    assert json.loads(data[4:]) == {"a": [1, None]}
