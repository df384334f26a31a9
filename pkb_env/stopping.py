"""The plan of a timed stage: which side goes first, when the pairs are looked at, when there are enough of them.

Looks come after 24, 36, 54, ... pairs, each half as many again; how many there could be is what `timing` divides its level by, so
that a claim holds whatever made the stage stop.  At a look timing ends when the interval is narrow, or coarse but far from 1: a
candidate that is clearly faster or slower is not worth hundreds of pairs.
Not here: taking pairs and the clock (`timed`), interval and claim (`timing`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from pkb_env.timing import BLOCKS_FROM, LEVEL, MIN_PAIRS, NARROW, Pair, interval, ratios, sign_test

FIRST_LOOK = BLOCKS_FROM
COARSE = 0.25
"""Relative width that is narrow enough where the whole interval lies beyond `NARROW`: wider ones save pairs where the noise is
large, and cost what is paid for, the lower end.  `tests/test_stopping.py -k coarse -s` prints pairs, errors and lower ends."""


def looks(most: int) -> int:
    """How often at most `most` pairs are looked at."""
    return len(list(_looks(most)))


def next_look(taken: int, most: int) -> int:
    """Number of pairs at the look after `taken` of at most `most` pairs."""
    return next((pairs for pairs in _looks(most) if pairs > taken), most)


def _looks(most: int) -> Iterator[int]:
    """Even numbers of pairs, so that blocks are whole, and `most`."""
    pairs = FIRST_LOOK
    while pairs < most:
        yield pairs
        pairs += pairs // 4 * 2
    yield most


def enough(pairs: Sequence[Pair], precision: float, most: int) -> bool:
    """Whether timing can end at this look.

    The relative width of the interval, high / low - 1, must be at most `precision`, or `COARSE` where the interval is far from 1;
    and an interval above 1 must be a proven claim by the level that `most` pairs at most leave to each look.
    """
    if len(pairs) < MIN_PAIRS:
        return False
    whole, bare = ratios(pairs)
    (low, high), (bare_low, bare_high) = interval(whole), interval(bare)
    decided = bare_low > NARROW or high < 1 / NARROW
    width = max(high / low, bare_high / bare_low) - 1
    proven = bare_low <= 1 or sign_test(bare) <= LEVEL / looks(most)
    return proven and width <= (max(COARSE, precision) if decided else precision)


def orders(rng: random.Random) -> Iterator[bool]:
    """Whether the candidate goes first, pair by pair: every block of two pairs holds both orders, in random order.

    The first call of a pair reads some percent slower.  Blocks are counted from the first pair that counts: begin anew for each
    group, and leave out an even number of pairs.
    """
    while True:
        first = rng.random() < 0.5
        yield first
        yield not first
