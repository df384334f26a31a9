"""The timed stage: adjacent pairs of calls in balanced random order on values never shown before, until they say enough.

Some of the calls are judged, told to nobody in advance: of every stretch between two looks a quota (of later ones half of it: to
move the median in them takes more wrong calls than in the first), each pair with the chance
missing / left (selection sampling, Knuth 1969, algorithm S), where the time that is left says how many pairs are to come: who
burns the budget is judged in every call that still counts.  The chance never falls below quota / stretch, so a candidate that
counts the judged calls by the gaps behind them gains nothing.
Not here: the statistic (`timing`), when there is enough of it (`stopping`), fresh groups (`attempt`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from pkb_env import stopping
from pkb_env.boxes import Box
from pkb_env.config import EvalConfig
from pkb_env.oracles import Oracle
from pkb_env.timing import MIN_PAIRS, Pair
from pkb_env.turns import Turn, Turns

TIMED_FROM = 1000
"""Trial numbers of timed pairs begin here, so that none repeats an untimed one."""
_WARM_PAIRS = 2
_MOST_BUDGETS = 3
"""So many budgets may go by before there are `MIN_PAIRS`: slow calls are timed too, endless ones are not."""


class TimedStage:
    """Times one candidate, in one or more groups."""

    def __init__(self, config: EvalConfig, oracle: Oracle, turns: Turns, rng: random.Random) -> None:
        self._config, self._oracle, self._turns, self._rng = config, oracle, turns, rng
        self._orders: Iterator[bool] = iter(())
        self._trial = TIMED_FROM
        self.right = True
        """False once a timed call came out wrong."""

    def group(self, box: Box, share: float = 1.0) -> list[Pair]:
        """Pairs of one group, without the first ones, which pay for page faults; `share`: of pairs and time.

        Raises:
            BoxFailed, HarnessError, Tampered: as calling and judging do.
        """
        most = max(MIN_PAIRS, int(share * self._config.pairs))
        end = time.monotonic() + share * self._config.time_budget_s
        self._orders = stopping.orders(self._rng)
        self._stretch(box, [], _WARM_PAIRS, end, judged=0)
        pairs: list[Pair] = []
        while self.right:
            quota = -(-self._config.judged_pairs // (2 if pairs else 1))
            self._stretch(box, pairs, stopping.next_look(len(pairs), most), end, quota)
            if len(pairs) >= most or time.monotonic() >= end or stopping.enough(pairs, self._config.precision, most):
                break
        return pairs

    def _stretch(self, box: Box, pairs: list[Pair], until: int, end: float, judged: int) -> None:
        """Time pairs until there are so many, or the time is over."""
        start, first = time.monotonic(), len(pairs)
        missing = min(judged, until - first)
        least = missing / (until - first)
        while self.right and len(pairs) < until:
            turn = self._turns.fill(self._trial)
            self._trial += 1
            pairs.append(self._pair(box, turn))
            done, now = len(pairs) - first, time.monotonic()
            left = min(until - len(pairs), (end - now) / (now - start) * done)
            if self._rng.random() < max(least, missing / max(left + 1, 1)):
                missing = max(0, missing - 1)
                self.right = self._turns.judge(turn)
            if now > end and (len(pairs) >= MIN_PAIRS or now > end + (_MOST_BUDGETS - 1) * self._config.time_budget_s):
                break

    def _pair(self, box: Box, turn: Turn) -> Pair:
        candidate_first = next(self._orders)
        if candidate_first:
            mine, theirs = box.call(turn.slot, turn.nonce), self._oracle.call(turn.slot, turn.nonce)
        else:
            theirs, mine = self._oracle.call(turn.slot, turn.nonce), box.call(turn.slot, turn.nonce)
        plumbing = mine.ns - mine.body_ns, theirs.ns - theirs.body_ns
        return Pair(theirs.body_ns, mine.ns, mine.skew_ns, *plumbing, theirs.outer_ns)
