"""The order of an evaluation: text, candidate, screen, store, attempt, verdict.  The only file that knows it.

Not here: what happens in one attempt (`attempt`), whose fault a broken harness is (`blame`), how processes live (`sandbox`).
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from pkb_env import backends, hardware
from pkb_env.attempt import Job, Machine, Result
from pkb_env.blame import run_with_blame
from pkb_env.boxes import Task
from pkb_env.broker import Broker
from pkb_env.cancellation import Cancellation
from pkb_env.config import EvalConfig, cache_dir
from pkb_env.errors import InvalidSource, UsageError
from pkb_env.locks import MachineLock
from pkb_env.pool import OraclePool
from pkb_env.problem_set import fitting, named
from pkb_env.sandbox.launcher import Zygote
from pkb_env.screen import check, mechanisms, screen
from pkb_env.store import Key, Store
from pkb_env.submission import Candidate, Submission, invalid, read
from problems.base import Problem
from rewards.verdict import Finding, Status, Verdict

TOPOLOGIES = ("cpu",)


class Evaluator:
    """Evaluates candidates on this machine.  Thread-safe; processes start at the first evaluation.

    Args:
        config: deadlines, caps and counts; defaults if None.
        store: where verdicts are looked up and kept; nothing is kept if None.

    Example:
        >>> with Evaluator() as evaluator:  # doctest: +SKIP
        ...     verdict = evaluator.evaluate(Submission(text, problem="allreduce", backend="cpp"))
    """

    def __init__(self, config: EvalConfig | None = None, store: Store | None = None) -> None:
        self.config, self.store = config or EvalConfig(), store
        self._slots = threading.BoundedSemaphore(self.config.slots or max(1, hardware.cores() // 2))
        self._lock = threading.Lock()
        self._machine: Machine | None = None

    def evaluate(self, submission: Submission, cancellation: Cancellation | None = None) -> Verdict:
        """One verdict; never raises for what a policy wrote.

        Raises:
            UsageError: problem, backend, topology, size, profile or world size do not exist or do not fit.
            Cancelled: `cancellation` was used; every process of the evaluation is gone.
        """
        problem = self._checked(submission)
        submission = replace(submission, problem=problem.slug)
        findings: tuple[Finding, ...] = ()
        try:
            candidate = read(submission.text)
            findings = screen(candidate, submission.backend)
            check(findings)
        except InvalidSource as error:
            return invalid(submission, problem.version, error, findings=findings)
        return self._evaluate(submission, problem, candidate, findings, cancellation or Cancellation())

    def evaluate_many(self, submissions: Iterable[Submission]) -> list[Verdict]:
        """Verdicts in the order of the submissions, evaluated concurrently; equal submissions are run once.

        Raises:
            UsageError: as `evaluate`, before anything is run.
        """
        wanted = list(submissions)
        unique = list(dict.fromkeys(wanted))
        for submission in unique:
            self._checked(submission)
        with ThreadPoolExecutor(max_workers=max(1, min(16, len(unique)))) as threads:
            found = dict(zip(unique, threads.map(self.evaluate, unique), strict=True))
        return [found[submission] for submission in wanted]

    async def aevaluate(self, submission: Submission) -> Verdict:
        """As `evaluate`; cancelling the task kills the candidate's processes and frees the locks."""
        cancellation = Cancellation()
        task = asyncio.create_task(asyncio.to_thread(self.evaluate, submission, cancellation))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            cancellation.cancel()
            await asyncio.wait([task])
            task.exception()  # retrieved: it is Cancelled, or came too late to matter
            raise

    def replay(self, stored_id: int) -> tuple[Verdict, Verdict]:
        """The stored verdict, and what the same source, settings and secret give now.

        Raises:
            UsageError: there is no store, or no such verdict in it.
        """
        if self.store is None:
            raise UsageError("this evaluator has no store; give one: Evaluator(store=Store(path))")
        stored = self.store.get(stored_id)
        old, candidate = stored.verdict, Candidate(stored.source)
        submission = Submission(
            stored.source, old.problem, old.backend, old.world_size, old.topology, old.profile, old.size
        )
        problem, findings = self._checked(submission), screen(candidate, submission.backend)
        job = Job(candidate, problem, _task(submission, problem), stored.secret, Cancellation())
        with self._slots:
            machine = replace(self.machine(), config=EvalConfig.model_validate_json(stored.key.config))
            result = run_with_blame(machine, job)
        return old, self._verdict(submission, problem, candidate, findings, result)

    def machine(self) -> Machine:
        """The long-lived parts, started on first use.

        Raises:
            UsageError: a wall of `require_walls` does not hold here.
            HarnessError: they cannot be started.
        """
        with self._lock:
            if self._machine is None:
                self._machine = _start(self.config)
            return self._machine

    def close(self) -> None:
        """End every process and remove every file of this evaluator; the cache of built libraries stays."""
        with self._lock:
            machine, self._machine = self._machine, None
        if machine is not None:
            machine.pool.close()
            machine.zygote.close()
            shutil.rmtree(machine.folder, ignore_errors=True)

    def __reduce__(self) -> tuple[type[Evaluator], tuple[EvalConfig, Store | None]]:
        """A copy is an evaluator with the same settings and processes of its own."""
        return Evaluator, (self.config, self.store)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, submission: Submission) -> Problem:
        if submission.topology not in TOPOLOGIES:
            raise UsageError(f"topology {submission.topology!r} is not there yet; there is {', '.join(TOPOLOGIES)}")
        backends.load(submission.backend, submission.topology)
        problem = named(submission.problem)
        fitting([problem], world_size=submission.world_size, size=submission.size, profile=submission.profile)
        return problem

    def _evaluate(
        self, submission: Submission, problem: Problem, candidate: Candidate, findings: tuple[Finding, ...],
        cancellation: Cancellation,
    ) -> Verdict:  # fmt: skip
        cancellation.check()
        empty = self._verdict(submission, problem, candidate, findings, None)
        cancellation.check()
        known = self.store.find(self._key(empty)) if self.store else None
        if known is not None:
            return known
        job = Job(candidate, problem, _task(submission, problem), secrets.token_bytes(32), cancellation)
        start = time.monotonic()
        with self._slots:
            waited = time.monotonic() - start
            result = run_with_blame(self.machine(), job)
        result.stage_s |= {"slot": round(waited, 4), "total": round(time.monotonic() - start, 4)}
        verdict = self._verdict(submission, problem, candidate, findings, result)
        if self.store and verdict.status is not Status.INFRA:
            self.store.put(self._key(verdict), verdict, candidate.source, job.secret)
            return self.store.find(self._key(verdict)) or verdict
        return verdict

    def _key(self, verdict: Verdict) -> Key:
        return Key.of(verdict, hardware.harness(), self.config.model_dump_json(exclude={"slots", "retries"}))

    def _verdict(
        self, submission: Submission, problem: Problem, candidate: Candidate, findings: tuple[Finding, ...],
        result: Result | None,
    ) -> Verdict:  # fmt: skip
        """The verdict of a result; without one, a stand-in that carries what the store's key is made of."""
        compiler = self.machine().broker.version
        base: dict[str, Any] = {
            "problem": problem.slug, "problem_version": problem.version, "profile": submission.profile, "size": submission.size,
            "world_size": submission.world_size, "backend": submission.backend, "topology": submission.topology,
            "digest": candidate.digest, "dtype": submission.dtype, "hardware": hardware.cpu(),
            "toolchain": hardware.toolchain(compiler), "mechanisms": mechanisms(candidate), "findings": findings,
        }  # fmt: skip
        if result is None:
            return Verdict(Status.INFRA, "submission", "not evaluated", **base)
        return Verdict(**base, **self._found(submission, result))

    def _found(self, submission: Submission, result: Result) -> dict[str, Any]:
        oversubscribed = submission.world_size > hardware.cores()
        walls = self.machine().zygote.walls
        found: dict[str, Any] = {
            "status": result.outcome.status, "stage": result.outcome.stage, "message": result.outcome.message,
            "ranks": result.outcome.ranks, "passed": result.passed, "public_rule": result.public_rule,
            "first_call_ms": result.first_call_ms, "stage_s": result.stage_s, "comparable": False,
            "walls": tuple(n for n, why_not in walls.items() if not why_not and n not in self.config.keep_open),
            "notes": ("oversubscribed: more ranks than cores",) if oversubscribed else (),
        }  # fmt: skip
        speed = result.speed
        if speed is not None:
            found |= {
                "comparable": not oversubscribed, "time_ms": speed.time_ms, "baselines": {"reference": speed.reference_ms},
                "speedup": speed.speedup, "speedup_low": speed.low, "speedup_high": speed.high, "faster": speed.faster,
                "skew": speed.skew,
            }  # fmt: skip
        return found


def _task(submission: Submission, problem: Problem) -> Task:
    return Task(
        problem.slug, problem.version, submission.world_size, submission.size, submission.profile, submission.dtype
    )


def _start(config: EvalConfig) -> Machine:
    runs = cache_dir() / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=runs))
    zygote = Zygote(folder)
    try:
        zygote.ensure()
        missing = [f"{n} ({zygote.walls.get(n, 'unknown')})" for n in config.require_walls if zygote.walls.get(n, "unknown")]
        if missing:
            raise UsageError(f"required walls do not hold here: {', '.join(missing)}; see `pkb doctor`")
    except BaseException:
        zygote.close()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Machine(config, zygote, Broker(zygote, config), OraclePool(zygote, folder, config), MachineLock(), folder)
