"""One attempt at one candidate: box and oracle side by side, judged trials, timed pairs, a verdict.

Raises HarnessError when something of ours failed; the evaluator decides who is to blame for that.
Not here: reading the text, caching, retries (`evaluator`); the comparisons (`judge`); the statistic (`timing`).
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from pkb_env import outcome, timing
from pkb_env.boxes import SLOTS, Box, BoxFailed, Call, Task
from pkb_env.cancellation import Cancellation
from pkb_env.machine import Machine
from pkb_env.oracles import Oracle
from pkb_env.outcome import Outcome
from pkb_env.source import literal_sources
from pkb_env.submission import Candidate
from problems.base import Problem
from rewards.verdict import RankReport, Status

_TIMED_TRIALS_FROM = 1000
"""Trial numbers of timed pairs begin here, so that none repeats an untimed one."""
_WARM_PAIRS = 2


@dataclass(frozen=True)
class Job:
    """What is to be evaluated, with the secret that its trials are drawn from."""

    candidate: Candidate
    problem: Problem
    task: Task
    secret: bytes
    cancellation: Cancellation
    timed: bool = True


@dataclass
class Result:
    """What an attempt found; the evaluator makes a verdict of it."""

    outcome: Outcome
    passed: float = 0.0
    public_rule: bool | None = None
    first_call_ms: float | None = None
    speed: timing.Speed | None = None
    stage_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Turn:
    """One call: which slot holds its arguments, the number its outputs must carry, which trial it is."""

    slot: int
    nonce: int
    trial: int


class Tampered(Exception):
    """Outside evidence of cheating."""


class Attempt:
    """One candidate in one fresh box."""

    def __init__(self, machine: Machine, job: Job) -> None:
        self.machine, self.job = machine, job
        self.stage_s: dict[str, float] = {}
        self._first_call: Call | None = None
        self._last: dict[str, int] | None = None

    def run(self) -> Result:
        """Evaluate.

        Raises:
            HarnessError: something of ours failed.
            Cancelled: the evaluation was given up.
        """
        with ExitStack() as groups:
            try:
                result = self._evaluate(groups)
            except BoxFailed as failure:
                result = Result(outcome.explain(failure.report, failure.deadline_s), first_call_ms=self._first_ms())
            except Tampered as evidence:
                result = Result(Outcome(Status.TAMPERED, "judge", str(evidence), ()), first_call_ms=self._first_ms())
        result.stage_s = {name: round(seconds, 4) for name, seconds in self.stage_s.items()}
        return result

    def _evaluate(self, groups: ExitStack) -> Result:
        job, machine = self.job, self.machine
        with ExitStack() as shared:
            with self._stage("queue"):
                shared.enter_context(machine.lock.shared(job.cancellation.check))
            oracle, box = self._start(groups)
            with self._stage("run"):
                right = all(self._judged_call(box, oracle, trial) for trial in range(machine.config.trials))
        speed = None
        if right and job.timed and machine.config.pairs:
            right, speed = self._alone(box, oracle)
        summary = oracle.ask("summary", last=self._last)
        _written(summary)
        return self._result(summary, box.peak_memory(), speed if right else None)

    def _start(self, groups: ExitStack) -> tuple[Oracle, Box]:
        """Oracle and box, ready; builds run meanwhile, and none outlasts this."""
        job, machine = self.job, self.machine
        builds = machine.broker.prefetch(literal_sources(job.candidate))
        try:
            with self._stage("oracle"):
                oracle = groups.enter_context(machine.pool.taken(job.task, job.cancellation))
                box = Box(machine.zygote, machine.config, machine.folder, machine.broker.build)
                groups.enter_context(self._opened(box))
                oracle.ask("begin")
            with self._stage("load"):
                box.load(job.candidate.source, job.task, oracle.ready(), str(machine.broker.prepared().native_library))
                box.await_ready()
        finally:
            for build in builds:
                build.join()
        return oracle, box

    @contextmanager
    def _opened(self, box: Box) -> Iterator[None]:
        try:
            with self.job.cancellation.watching(box.channel):
                yield
        finally:
            with self._stage("end"):
                box.close()

    def _alone(self, box: Box, oracle: Oracle) -> tuple[bool, timing.Speed | None]:
        """The timed stage has the machine alone."""
        with ExitStack() as waiting:
            with self._stage("queue"):
                waiting.enter_context(self.machine.lock.alone(self.job.cancellation.check))
            with self._stage("time"):
                return self._timed(box, oracle)

    def _result(self, summary: dict[str, Any], peaks: list[int | None], speed: timing.Speed | None) -> Result:
        reports = [RankReport(**r | {"index": tuple(r["index"]) if r["index"] else None}) for r in summary["ranks"]]
        ranks = tuple(replace(r, phase="returned", peak_memory_bytes=p) for r, p in zip(reports, peaks, strict=True))
        right = summary["passed"] == 1.0
        found = Outcome(
            Status.CORRECT if right else Status.WRONG_RESULT, "time" if speed else "judge",
            "every comparison holds" if right else summary["message"], ranks,
        )  # fmt: skip
        return Result(found, summary["passed"], summary["public_rule"], self._first_ms(), speed)

    def _first_ms(self) -> float | None:
        return self._first_call.ns / 1e6 if self._first_call else None

    def _judged_call(self, box: Box, oracle: Oracle, trial: int) -> bool:
        """One untimed trial; whether every comparison holds."""
        turn = _Turn(trial % SLOTS, secrets.randbits(63), trial)
        self._fill(oracle, turn)
        call = box.call(turn.slot, turn.nonce)
        self._first_call = self._first_call or call
        oracle.call(turn.slot, turn.nonce)
        return self._judge(oracle, turn)

    def _fill(self, oracle: Oracle, turn: _Turn) -> None:
        _written(oracle.ask("fill", **vars(turn), secret=self.job.secret.hex(), last=self._last))
        self._last = vars(turn)

    def _judge(self, oracle: Oracle, turn: _Turn) -> bool:
        start = time.monotonic()
        answer = oracle.ask("judge", **vars(turn), secret=self.job.secret.hex())
        self.stage_s["judge"] = self.stage_s.get("judge", 0.0) + time.monotonic() - start
        if "violation" in answer:
            raise Tampered(answer["violation"])
        return bool(answer["passed"] == answer["total"])

    def _timed(self, box: Box, oracle: Oracle) -> tuple[bool, timing.Speed | None]:
        """Adjacent pairs in random order on values never shown before; some are judged, told to nobody in advance.

        Each is judged with the chance missing / left (selection sampling, Knuth 1969, algorithm S), where the time that is
        left says how many pairs are to come: who burns the budget is judged in every call that still counts.
        """
        config, rng = self.machine.config, random.Random(self.job.secret)  # noqa: S311  an order, not a secret
        pairs: list[timing.Pair] = []
        start = time.monotonic()
        end = start + config.time_budget_s
        total = config.pairs + _WARM_PAIRS
        missing = min(config.judged_pairs, total)
        for number in range(total):
            turn = _Turn(number % SLOTS, secrets.randbits(63), _TIMED_TRIALS_FROM + number)
            self._fill(oracle, turn)
            pairs.append(_pair(box, oracle, turn, candidate_first=rng.random() < 0.5))
            now = time.monotonic()
            left = min(total - number - 1, (end - now) / (now - start) * (number + 1))
            if rng.random() * (left + 1) < missing:
                missing -= 1
                if not self._judge(oracle, turn):
                    return False, None
            if now > end:
                break
        return True, timing.summarise(pairs[_WARM_PAIRS:])

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.stage_s[name] = self.stage_s.get(name, 0.0) + time.monotonic() - start


def _written(answer: dict[str, Any]) -> None:
    if answer.get("unwritten") is not None:
        raise Tampered(f"rank {answer['unwritten']} said that it was done before its output was there")


def _pair(box: Box, oracle: Oracle, turn: _Turn, *, candidate_first: bool) -> timing.Pair:
    if candidate_first:
        mine, theirs = box.call(turn.slot, turn.nonce), oracle.call(turn.slot, turn.nonce)
    else:
        theirs, mine = oracle.call(turn.slot, turn.nonce), box.call(turn.slot, turn.nonce)
    return timing.Pair(theirs.ns, mine.ns, mine.skew_ns, theirs.ns - theirs.bare_ns)
