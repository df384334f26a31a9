"""The last question to a right candidate: calls with no pause between them, while one rank is late.

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

TRIALS = range(TIMED_FROM - 5, TIMED_FROM - 1)
"""Numbers of the trials: two rows of two."""
_LEAST_S, _MOST_S = 0.005, 0.1


@dataclass(frozen=True)
class Row:
    """Two calls, the rank that is late in them, and whether it comes first at the first wait."""

    late: int
    begins: bool

    def __str__(self) -> str:
        return (
            f" (in two calls with no pause between them, where rank {self.late} was slower than the others: what a rank may "
            "still have to read must not be overwritten, so wait for all at the end of a call, or take other memory for the next)"
        )


def rows(secret: bytes, world_size: int) -> tuple[Row, Row]:
    """In one of them the first rank is late, the root of most trees, in one another; at odd waits in one, at even in one."""
    rng = random.Random(secret)  # noqa: S311  a choice, not a secret
    late, begins = [0, rng.randrange(1, world_size)], [True, False]
    rng.shuffle(late)
    rng.shuffle(begins)
    return Row(late[0], begins[0]), Row(late[1], begins[1])


def holds(box: Box, turns: Turns, row: Row, trials: range, before: Call) -> bool:
    """Whether every comparison of both calls holds; `before`: any call, which tells how long one takes.

    Raises:
        BoxFailed, HarnessError, Tampered: as calling and judging do.
    """
    ready = turns.ahead(trials)
    patience = min(_MOST_S, max(_LEAST_S, before.ns / 1e9))
    box.call_in_a_row([(turn.slot, turn.nonce) for turn in ready], row.late, patience, begins=row.begins)
    return all(turns.judge(turn) for turn in ready)
