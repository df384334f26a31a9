"""The last question to a right candidate: two calls with no pause between them, while ranks take turns in being late.

Single calls forgive what a training loop does not: a kernel that overwrites, in its next call, what a slower rank has yet to
read.  Whoever leaves out the wait at the end is faster in every single call.
Not here: how a rank is made late (`sandbox.straggler`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from pkb_env.boxes import Box
from pkb_env.call import Call
from pkb_env.timed import TIMED_FROM
from pkb_env.turns import Turns

TRIALS = (TIMED_FROM - 3, TIMED_FROM - 2)
"""Numbers of the two trials."""
_LEAST_S, _MOST_S = 0.005, 0.1


@dataclass(frozen=True)
class Row:
    """Which rank is on one side, and whether it begins."""

    late: int
    begins: bool

    def __str__(self) -> str:
        return (
            f" (in two calls with no pause between them, where rank {self.late} and the others took turns in being slow: what a "
            "rank may still have to read must not be overwritten, so wait for all at the end of a call, or take other memory for "
            "the next)"
        )


def drawn(secret: bytes, world_size: int) -> Row:
    """The row of an evaluation."""
    rng = random.Random(secret)  # noqa: S311  a choice, not a secret
    return Row(rng.randrange(world_size), rng.random() < 0.5)


def holds(box: Box, turns: Turns, row: Row, before: Call) -> bool:
    """Whether every comparison of both calls holds; `before`: any call, which tells how long one takes.

    Raises:
        BoxFailed, HarnessError, Tampered: as calling and judging do.
    """
    ready = turns.ahead(TRIALS)
    patience = min(_MOST_S, max(_LEAST_S, before.ns / 1e9))
    box.call_in_a_row([(turn.slot, turn.nonce) for turn in ready], row.late, patience, begins=row.begins)
    return all(turns.judge(turn) for turn in ready)
