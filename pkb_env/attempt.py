"""One attempt at one candidate: box and oracle side by side, judged trials, timed pairs, a verdict.

Raises HarnessError when something of ours failed; the evaluator decides who is to blame for that.
Not here: reading the text, caching, retries (`evaluator`); inputs and comparisons (`turns`, `judge`); pairs (`timed`); the
statistic (`timing`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from pkb_env import kernels, outcome, remarks, row, stopping, timing
from pkb_env.box import control
from pkb_env.boxes import SLOTS, Box, BoxFailed, Task
from pkb_env.broker import Builds
from pkb_env.call import Call
from pkb_env.cancellation import Cancellation
from pkb_env.errors import HarnessError
from pkb_env.load import Others
from pkb_env.locks import Share
from pkb_env.machine import Machine
from pkb_env.oracles import Oracle
from pkb_env.outcome import Outcome
from pkb_env.source import literal_sources
from pkb_env.submission import Candidate
from pkb_env.timed import TIMED_FROM, TimedStage
from pkb_env.turns import Tampered, Turn, Turns
from problems.base import Problem
from rewards.verdict import Kernel, RankReport, Status

_PROFILED = TIMED_FROM - 1
"""Number of the trial that is called under the profiler."""
_SHARE_OF_MORE = 0.5
"""Of the pairs and the time of the first group, for each fresh group that repeats a narrow claim."""


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
    notes: tuple[str, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    proves: bool = True
    """Whether the timed pairs may be believed."""

    @property
    def faster(self) -> bool:
        """Whether the candidate is proven faster than the reference."""
        return self.speed is not None and self.speed.faster and self.proves


class Attempt:
    """One candidate, in a fresh box; a narrow claim is repeated in more of them."""

    def __init__(self, machine: Machine, job: Job) -> None:
        self.machine, self.job = machine, job
        self.stage_s: dict[str, float] = {}
        self._first_call: Call | None = None
        self._last_call: Call | None = None
        self._others, self._row = 0.0, None  # type: float, row.Row | None

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
        if self._row is not None and result.outcome.status is not Status.CORRECT:
            result.outcome = replace(result.outcome, message=f"{result.outcome.message}{self._row}")
        result.stage_s = {name: round(seconds, 4) for name, seconds in self.stage_s.items()}
        return result

    def _evaluate(self, groups: ExitStack) -> Result:
        job, machine = self.job, self.machine
        with ExitStack() as shared:
            with self._stage("queue"):
                share = shared.enter_context(machine.lock.shared(job.cancellation.check))
            oracle, turns, box, ready = self._start(groups, share)
            with self._stage("run"):
                right = all(self._judged_call(box, turns, trial, ready) for trial in range(machine.config.trials))
            timed = right and job.timed and machine.config.pairs > 0
            right = right and (timed or self._in_a_row(box, turns))
        speed = None
        if timed:
            right, speed = self._alone(box, oracle, turns)
        summary = turns.summary()
        kernels, failed = self._kernels(box, turns) if right and machine.config.kernels and job.task.devices else ((), ())
        self.stage_s["judge"] = turns.judge_s
        result = self._result(summary, box.peak_memory(), speed if right else None)
        against = remarks.against_proof(box, self._others, job.task.world_size)
        result.proves = not against
        on_speed = (*remarks.on_times(oracle, result.speed), *against) if result.speed else ()
        result.notes = (*failed, *remarks.on_inputs(oracle), *summary["notes"], *on_speed)
        result.kernels = kernels
        return result

    def _start(self, groups: ExitStack, share: Share) -> tuple[Oracle, Turns, Box, list[Turn]]:
        """Oracle and box, ready; builds, inputs and answers are made meanwhile, and none outlasts this."""
        job, machine = self.job, self.machine
        builds = groups.enter_context(machine.broker.prefetched(literal_sources(job.candidate)))
        with self._stage("oracle"):
            oracle = groups.enter_context(machine.pool.taken(job.task, job.cancellation))
            oracle.ask("begin")
        turns = Turns(oracle, job.secret)
        with self._stage("load"), ThreadPoolExecutor(1) as beside:
            box = self._open(groups, oracle)
            ahead = beside.submit(turns.ahead, range(min(machine.config.trials, SLOTS)))
            box.share, box.quiet = share, lambda: ahead.done() and not any(build.is_alive() for build in builds)
            try:
                box.await_ready()
            except BoxFailed:
                ahead.result()  # where the reference does not come up either it is not the candidate's doing
                raise
            for build in builds:
                build.join()
            return oracle, turns, box, ahead.result()

    def _open(self, groups: ExitStack, oracle: Oracle, builds: Builds = Builds.SHARED) -> Box:
        """A box that loads the candidate."""
        job, machine = self.job, self.machine
        box = Box(machine.zygote, machine.config, machine.folder, machine.broker.build)
        box.builds = builds
        groups.enter_context(self._opened(box))
        native = "" if job.task.devices else str(machine.broker.prepared().native_library)
        box.load(job.candidate.source, job.task, oracle.ready(), native)
        return box

    @contextmanager
    def _opened(self, box: Box) -> Iterator[None]:
        try:
            with self.job.cancellation.watching(box.channel):
                yield
        finally:
            with self._stage("end"):
                box.close()

    def _judged_call(self, box: Box, turns: Turns, trial: int, ready: list[Turn]) -> bool:
        """One untimed trial; whether every comparison holds."""
        turn = ready[trial] if trial < len(ready) else turns.ahead([trial])[0]
        call = box.call(turn.slot, turn.nonce)
        self._first_call, self._last_call = self._first_call or call, call
        return turns.judge(turn)

    def _kernels(self, box: Box, turns: Turns) -> tuple[tuple[Kernel, ...], tuple[str, ...]]:
        """What runs on the GPUs in one more call; whatever goes wrong in it changes no verdict."""
        with self._stage("kernels"):
            turn = turns.fill(_PROFILED)
            try:
                box.call(turn.slot, turn.nonce, control.PROFILE)
                return kernels.read(turns.told(turn)), ()
            except (BoxFailed, HarnessError) as error:
                return (), (f"no kernels: the call under the profiler failed ({error})",)

    def _alone(self, box: Box, oracle: Oracle, turns: Turns) -> tuple[bool, timing.Speed | None]:
        """The timed stage has the machine alone."""
        with ExitStack() as waiting:
            with self._stage("queue"):
                waiting.enter_context(self.machine.lock.alone(self.job.cancellation.check))
            with self._stage("time"):
                right, speed = self._timed(box, oracle, turns)
            return right and self._in_a_row(box, turns), speed

    def _timed(self, box: Box, oracle: Oracle, turns: Turns) -> tuple[bool, timing.Speed | None]:
        """One group; a narrow claim is repeated in fresh ones, of the candidate and of the reference."""
        config, rng = self.machine.config, random.Random(self.job.secret)  # noqa: S311  an order, not a secret
        stage, looks = TimedStage(config, oracle, turns, rng), stopping.looks(config.pairs)
        groups = [self._group(stage, box, oracle)]
        if (speed := timing.pool(groups, looks)) is not None and timing.needs_repeat(speed):
            groups += [self._again(stage, oracle) for _ in range(timing.GROUPS - 1) if stage.right]
        return stage.right, timing.pool(groups, looks) if stage.right else None

    def _in_a_row(self, box: Box, turns: Turns) -> bool:
        """Whether calls with no pause between them are right too, after all that is timed: nobody knows which ones they are."""
        job, call = self.job, self._last_call
        if job.task.world_size == 1 or not self.machine.config.straggler or call is None:
            return True
        with self._stage("row"):
            self._row = row.drawn(job.secret, job.task.world_size)
            return row.holds(box, turns, self._row, call)

    def _again(self, stage: TimedStage, oracle: Oracle) -> list[timing.Pair]:
        with ExitStack() as groups:
            oracle.renew()
            groups.enter_context(self.job.cancellation.watching(*oracle.channels()))
            box = self._open(groups, oracle, builds=Builds.ALONE)
            box.await_ready()
            return self._group(stage, box, oracle, _SHARE_OF_MORE)

    def _group(self, stage: TimedStage, box: Box, oracle: Oracle, share: float = 1.0) -> list[timing.Pair]:
        """Time one group, and see what others do meanwhile; no compiler runs for it now."""
        box.share, box.builds = None, Builds.NONE
        with Others([c.peer for c in (box.channel, *oracle.channels()) if c.peer]) as others:
            pairs = stage.group(box, share)
        self._others = max(self._others, others.cores)
        return pairs

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

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.stage_s[name] = self.stage_s.get(name, 0.0) + time.monotonic() - start
