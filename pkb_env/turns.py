"""The turns of one evaluation: fresh inputs, what the oracle has ready for them, comparisons of what came out.

Not here: calling the box (`attempt`, `timed`), which turns are timed (`timed`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pkb_env.boxes import SLOTS
from pkb_env.oracles import Oracle


class Tampered(Exception):
    """Outside evidence of cheating."""


@dataclass(frozen=True)
class Turn:
    """One call: which slot holds its arguments, the number its outputs must carry, which trial it is."""

    slot: int
    nonce: int
    trial: int


class Turns:
    """What is asked of an oracle during one evaluation; no trial number is used twice."""

    def __init__(self, oracle: Oracle, secret: bytes) -> None:
        self._oracle, self._secret, self._last = oracle, secret.hex(), None  # type: tuple[Oracle, str, dict[str, int] | None]
        self.judge_s = 0.0
        """Seconds spent on comparisons."""

    def ahead(self, trials: Iterable[int]) -> list[Turn]:
        """Inputs, the reference's outputs and the exact answers of at most `SLOTS` trials, before the candidate needs them.

        Raises:
            Tampered: as `fill`.
        """
        turns = []
        for trial in trials:
            turn = Turn(trial % SLOTS, secrets.randbits(63), trial)
            _written(self._oracle.ask("fill", **vars(turn), secret=self._secret, last=self._last))
            self._last = None
            self._oracle.call(turn.slot, turn.nonce)
            self._oracle.ask("prepare", **vars(turn), secret=self._secret)
            turns.append(turn)
        return turns

    def fill(self, trial: int) -> Turn:
        """Values that the box has never seen, put into the next slot just before they are used.

        Raises:
            Tampered: a rank had said that it was done before its last output was there.
        """
        turn = Turn(trial % SLOTS, secrets.randbits(63), trial)
        _written(self._oracle.ask("fill", **vars(turn), secret=self._secret, last=self._last))
        self._last = vars(turn)
        return turn

    def judge(self, turn: Turn) -> bool:
        """Whether every comparison of this turn holds.

        Raises:
            Tampered: what a rank left cannot be an output.
        """
        start = time.monotonic()
        answer = self._oracle.ask("judge", **vars(turn), secret=self._secret)
        self.judge_s += time.monotonic() - start
        if "violation" in answer:
            raise Tampered(answer["violation"])
        return bool(answer["passed"] == answer["total"])

    def told(self, turn: Turn) -> list[str]:
        """The text that each rank left in the place of its outputs; empty where it left none."""
        return list(self._oracle.ask("told", **vars(turn))["texts"])

    def summary(self) -> dict[str, Any]:
        """All comparisons in one; see `judging.Record.summary`.

        Raises:
            Tampered: as `fill`.
        """
        summary = self._oracle.ask("summary", last=self._last)
        _written(summary)
        return summary


def _written(answer: dict[str, Any]) -> None:
    if answer.get("unwritten") is not None:
        raise Tampered(f"rank {answer['unwritten']} said that it was done before its output was there")
