"""The order of an evaluation: text, candidate, screen, store, attempt, verdict.  The only file that knows it.

Not here: what happens in one attempt (`attempt`), whose fault a broken harness is (`blame`), how processes live (`sandbox`).
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import threading
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from pkb_env import backends, hardware, topology
from pkb_env.assembly import Case
from pkb_env.attempt import Job
from pkb_env.blame import run_with_blame
from pkb_env.boxes import Task
from pkb_env.cancellation import Cancellation, Cancelled
from pkb_env.config import EvalConfig
from pkb_env.errors import InvalidSource, UsageError
from pkb_env.machine import Machine
from pkb_env.problem_set import fitting, named
from pkb_env.screen import check, screen
from pkb_env.store import Key, Store
from pkb_env.submission import Candidate, Submission, invalid, read
from pkb_env.toolchain import NoCompiler
from problems.base import Problem
from rewards.verdict import Finding, Status, Verdict

_MOST_THREADS, _MOST_RANKS, _MOST_PER_CORE = 16, 64, 8


class Evaluator:
    """Evaluates candidates on this machine.  Thread-safe; processes start at the first evaluation.

    Args:
        config: deadlines, caps and counts; defaults if None.
        store: where verdicts are looked up and kept; nothing is kept if None.

    Example:
        >>> with Evaluator() as evaluator:  # doctest: +SKIP
        ...     verdict = evaluator.evaluate(Submission(text, problem="allreduce", backend="cpp"))
    """

    def __init__(self, config: EvalConfig | Mapping[str, Any] | None = None, store: Store | None = None) -> None:
        self.config, self.store = EvalConfig.of(config), store
        self._slots = threading.BoundedSemaphore(self.config.slots or max(1, hardware.cores() // 2))
        self._lock, self._waited_s = threading.Lock(), 0.0
        self._machine: Machine | None = None
        self._closing: weakref.finalize[..., Evaluator] | None = None

    @property
    def waited_s(self) -> float:
        """Seconds that evaluations have waited for a slot so far, together: over some time, its growth is the queue's depth."""
        return self._waited_s

    def evaluate(self, submission: Submission, cancellation: Cancellation | None = None) -> Verdict:
        """One verdict; never raises for what a policy wrote.

        Raises:
            UsageError: problem, backend, topology, size, profile or world size do not exist or do not fit this machine.
            Cancelled: `cancellation` was used; every process of the evaluation is gone.
        """
        submission, problem = self._checked(submission)
        findings: tuple[Finding, ...] = ()
        try:
            candidate = read(submission.text)
            findings = screen(candidate, submission.backend)
            check(findings)
        except InvalidSource as error:
            return invalid(submission, problem.version, error, findings=findings)
        case, cancellation = Case(submission, problem, candidate, findings), cancellation or Cancellation()
        try:
            return self._evaluate(case, cancellation)
        except Cancelled:
            if not cancellation.why:
                raise
            return case.pending(self.machine()).but(stage="harness", message=cancellation.why)

    def evaluate_many(self, submissions: Iterable[Submission], deadline_s: float | None = None) -> list[Verdict]:
        """Verdicts in the order of the submissions, evaluated concurrently; equal submissions are run once.

        Args:
            submissions: what is to be evaluated.
            deadline_s: seconds after which the rest is given up: INFRA, and not stored; None: never.

        Raises:
            UsageError: as `evaluate`, before anything is run.
        """
        wanted, cancellation = list(submissions), Cancellation()
        unique = list(dict.fromkeys(wanted))
        for submission in unique:
            self._checked(submission)
        workers = max(1, min(_MOST_THREADS, len(unique)))
        with _given_up_after(deadline_s, cancellation), ThreadPoolExecutor(max_workers=workers) as threads:
            try:
                verdicts = list(threads.map(partial(self.evaluate, cancellation=cancellation), unique))
            except BaseException:  # an interrupt in this thread: the others must not go on for minutes
                cancellation.cancel()
                raise
        found = dict(zip(unique, verdicts, strict=True))
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
        submission, problem = self._checked(
            Submission(stored.source, old.problem, old.backend, old.world_size, old.topology, old.profile, old.size)
        )
        case = Case(submission, problem, candidate, screen(candidate, submission.backend))
        with self._slots:
            machine = replace(self.machine(), config=EvalConfig.model_validate_json(stored.key.config))
            return old, case.verdict(machine, run_with_blame(machine, _job(case, stored.secret, Cancellation())))

    def machine(self) -> Machine:
        """The long-lived parts, started on first use.

        Raises:
            UsageError: a wall of `require_walls` does not hold here.
            HarnessError: they cannot be started.
        """
        with self._lock:
            if self._machine is None:
                self._machine = Machine.start(self.config, [self.store.path] if self.store else [])
                self._closing = weakref.finalize(self, self._machine.close)
            return self._machine

    def close(self) -> None:
        """End every process and remove every file of this evaluator; it starts anew when it is used again."""
        with self._lock:
            closing, self._machine = self._closing, None
        if closing is not None:
            closing()

    def __reduce__(self) -> tuple[type[Evaluator], tuple[EvalConfig, Store | None]]:
        """A copy is an evaluator with the same settings and processes of its own."""
        return Evaluator, (self.config, self.store)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, submission: Submission) -> tuple[Submission, Problem]:
        """The submission with its topology settled and its problem's slug, and the problem."""
        if type(submission.world_size) is not int:
            raise UsageError(f"world size {submission.world_size!r} is no int; wanted a number of ranks, such as 2")
        submission = topology.settled(submission, self.config.gpus)
        backends.load(submission.backend, submission.topology)
        self._require_tools(submission.backend)
        problem, most = named(submission.problem), min(_MOST_RANKS, _MOST_PER_CORE * hardware.cores())
        if submission.world_size > most:
            raise UsageError(f"world size {submission.world_size} is more than {most} ({_MOST_PER_CORE} ranks a core)")
        fitting([problem], world_size=submission.world_size, size=submission.size, profile=submission.profile)
        return replace(submission, problem=problem.slug), problem

    def _require_tools(self, backend: str) -> None:
        """A machine that cannot build what the candidates of a backend need must not look like ones that do not compile."""
        try:
            if backend == "cuda":
                self.machine().broker.cuda()
            elif backend == "triton":
                self.machine().broker.triton()
        except NoCompiler as error:
            raise UsageError(f"backend {backend!r} cannot be used on this machine: {error}") from None

    def _evaluate(self, case: Case, cancellation: Cancellation) -> Verdict:
        cancellation.check()
        machine = self.machine()
        if case.problem.pack:
            machine.zygote.hide(Path(case.problem.pack.path))
        known = self.store.find(self._key(case.pending(machine))) if self.store else None
        if known is not None:
            return known
        secret, start = secrets.token_bytes(32), time.monotonic()
        with self._slots:
            waited = time.monotonic() - start
            with self._lock:
                self._waited_s += waited
            cancellation.check()
            result = run_with_blame(machine, _job(case, secret, cancellation))
        result.stage_s |= {"slot": round(waited, 4), "total": round(time.monotonic() - start, 4)}
        verdict = case.verdict(machine, result)
        if self.store and verdict.status is not Status.INFRA:
            return self._kept(self.store, verdict, case, secret)
        return verdict

    def _kept(self, store: Store, verdict: Verdict, case: Case, secret: bytes) -> Verdict:
        """The verdict as the store has it; a store that fails costs nobody a verdict."""
        try:
            store.put(self._key(verdict), verdict, case.candidate.source, secret)
            return store.find(self._key(verdict)) or verdict
        except (sqlite3.Error, OSError) as error:
            warnings.warn(f"the verdict is not stored: {error}", RuntimeWarning, stacklevel=2)
            return verdict

    def _key(self, verdict: Verdict) -> Key:
        return Key.of(verdict, hardware.harness(), self.config.model_dump_json(exclude={"slots", "retries", "gpus"}))


@contextmanager
def _given_up_after(deadline_s: float | None, cancellation: Cancellation) -> Iterator[None]:
    if deadline_s is None:
        yield
        return
    timer = threading.Timer(deadline_s, cancellation.cancel, [f"given up: not evaluated within {deadline_s:g} s of its batch"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _job(case: Case, secret: bytes, cancellation: Cancellation) -> Job:
    s, problem = case.submission, case.problem
    pack = problem.pack.path if problem.pack else ""
    task = Task(problem.slug, problem.version, s.world_size, s.size, s.profile, s.dtype, s.topology, pack)
    return Job(case.candidate, problem, task, secret, cancellation)
