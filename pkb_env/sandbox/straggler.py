"""Calls without a pause between them, where ranks are late: who overwrites what they have yet to read, does so here.

A rank that is done gets its next order at once, as in a training step; whoever is not may still be inside the call before.
One rank and all others go on by turns, each side until nobody in it can: whoever stops at a wait is left behind there, while
the other side passes it, finishes, and begins the next call.
All of it is signals from outside: nothing that a rank can read tells it from a busy machine.  They stop processes, not what
these have started on a GPU.
Not here: which calls these are and which rank it is (`row`), one call (`group`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle

from pkb_env.box import control
from pkb_env.sandbox.group import Group
from pkb_env.sandbox.rank import Rank

_LOOK_S, _LOOKS = 0.00005, 2
"""So many looks one after the other must find that nothing runs."""
_MOST = 20
"""After so many times the patience all go on together."""


class Row:
    """A row of calls of every rank.

    Args:
        group: stands still.
        orders: one for each call.
        late: number of the one rank.
        begins: whether it goes first.
        patience_s: longest time in which one side goes on while the other stands still.
    """

    def __init__(self, group: Group, orders: Sequence[control.Order], late: int, patience_s: float, *, begins: bool) -> None:
        self._group, self._orders, self._patience_s = group, orders, patience_s
        sides = [group.ranks[late]], [rank for rank in group.ranks if rank.rank != late]
        self._sides = sides if begins else sides[::-1]
        self._begun = dict.fromkeys(range(group.world_size), 0)

    def run(self, deadline_s: float) -> str | None:
        """As `Group.wait`: None when every rank has done every call, else what went wrong; no rank stands still then."""
        start = time.monotonic()
        for rank in self._group.ranks:
            rank.forget_done()
        trouble = self._run_by_turns(start + _MOST * self._patience_s)
        self._group.resume()
        return trouble or self._group.wait(self._all_done, start + deadline_s - time.monotonic())

    def _run_by_turns(self, end: float) -> str | None:
        """The side that goes on, while the other stands still, and so on; what went wrong meanwhile."""
        trouble = None
        for turn in cycle((0, 1)):
            mine, other = self._sides[turn], self._sides[1 - turn]
            self._group.pause(other)
            self._group.resume(mine)
            for rank in mine:
                if not self._begun[rank.rank]:
                    self._begin(rank)
            trouble = self._settled(mine)
            if trouble is not None or self._all_done() or time.monotonic() > end:
                break
        return trouble

    def _begin(self, rank: Rank) -> None:
        """Its next order."""
        rank.finished_ns = None
        rank.page.put(self._orders[self._begun[rank.rank]])
        self._begun[rank.rank] += 1
        rank.let_go()

    def _all_done(self) -> bool:
        """Whether every rank has done every call; whoever is done with one begins the next."""
        for rank in self._group.ranks:
            if rank.finished_ns is not None and self._begun[rank.rank] < len(self._orders):
                self._begin(rank)
        return all(self._done(rank) for rank in self._group.ranks)

    def _done(self, rank: Rank) -> bool:
        return rank.finished_ns is not None and self._begun[rank.rank] == len(self._orders)

    def _settled(self, side: Sequence[Rank]) -> str | None:
        """Wait until these ranks wait or have done everything, but not for long; what failed meanwhile."""
        end, looks = time.monotonic() + self._patience_s, 0
        while looks < _LOOKS and time.monotonic() < end:
            if self._group.look() is not None:
                return "failed"
            self._all_done()
            looks = 0 if any(rank.running() and not self._done(rank) for rank in side) else looks + 1
            time.sleep(_LOOK_S)
        return None
