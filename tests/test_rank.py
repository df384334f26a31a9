"""What a supervisor makes of a rank's processor time: a reading that is short by a tick blames nobody, running does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from pkb_env.sandbox.rank import RAN_EACH_NS, RAN_ONCE_NS, Rank

MILLISECOND = 1_000_000


class Stopped(Rank):
    """A rank whose processor time while it is stopped is written down beforehand."""

    def __init__(self, ran_ns: Iterable[int]) -> None:
        nothing: Any = None
        super().__init__(0, nothing, nothing, -1, -1, -1, -1)
        self._ran, self._now = iter(ran_ns), 0

    def cpu_ns(self) -> int:
        return self._now

    def again(self) -> None:
        """Stop, run for as long as is written, wake."""
        self.stopped()
        self._now += next(self._ran)
        self.woken()


@pytest.mark.parametrize(
    ("ran", "fails"),
    [
        ([4 * MILLISECOND, *[0] * 99], False),
        ([10 * MILLISECOND, *[RAN_EACH_NS // 2] * 99], False),
        ([RAN_ONCE_NS + RAN_EACH_NS + 1], True),
        ([MILLISECOND] * 30, True),
        ([0] * 30 + [MILLISECOND] * 100, True),
    ],
)
def test_a_tick_is_forgiven_and_work_is_not(ran: list[int], fails: bool) -> None:
    rank = Stopped(ran)
    for _ in ran:
        rank.again()
    assert rank.failed == fails
    if rank.violation is not None:
        assert "while it was stopped" in rank.violation
