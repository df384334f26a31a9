"""What a planted candidate is made of: its kind, what it must end with, and the frame that the short ones share.  Text only.

In a text, `@rank@` and `@call@` stand for the rank and the call that go wrong, `@store@` for where verdicts are kept.
Not here: the kinds (`soak_texts`, `soak_attacks`), which of them are drawn (`soak_mix`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rewards.verdict import Status

GROUPS = ("honest", "wrong", "faulty", "hostile")
_HEAD = """\
import contextlib, ctypes, gc, json, mmap, os, signal, socket, struct, sys, threading, time

import torch
import torch.distributed as dist

calls = 0


def turn():
    global calls
    calls += 1
    return dist.get_rank() == @rank@ and calls == @call@


def right(tensor):
    out = tensor.clone()
    dist.all_reduce(out)
    return out


def worker():
    frame = sys._getframe()
    while not hasattr(frame.f_locals.get("state"), "channel"):
        frame = frame.f_back
    return frame.f_locals["state"]


"""


@dataclass(frozen=True)
class Kind:
    """One way to be right or to go wrong."""

    name: str
    group: str
    """One of `GROUPS`."""
    expected: tuple[Status, ...]
    """Any of them is right."""
    source: Callable[[str], str]
    """The text for a problem."""
    backend: str = "torch"
    anywhere: bool = False
    """Whether it fits every problem; else it is written for allreduce."""
    late: bool = False
    """Whether it may go wrong in a timed call too, where not everything is judged."""
    weight: int = 1
    """How often it is in a deck."""


def kinds(group: str, table: Mapping[str, tuple[tuple[Status, ...], str]], *, late: bool = False) -> Iterable[Kind]:
    """The rows of a table: name, statuses, text."""
    for name, (expected, text) in table.items():
        yield Kind(name, group, expected, _always(text), late=late)


def _always(text: str) -> Callable[[str], str]:
    return lambda _: text


def whole(*lines: str, before: str = "") -> str:
    """A candidate whose `solution(tensor)` consists of these lines."""
    return f"{_HEAD}{before}def solution(tensor):\n" + "".join(f"    {line}\n" for line in lines)


def once(*lines: str, before: str = "") -> str:
    """A candidate that does these lines on one rank in one call, and is right otherwise."""
    return whole("if turn():", *(f"    {line}" for line in lines), "return right(tensor)", before=before)
