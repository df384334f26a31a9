"""Whose fault is it when the harness fails while a candidate runs?

A failure is first laid at the harness's door: a known-good canary (the reference's own source, in a fresh box) is run.
If the canary fails, the machine is at fault: INFRA.  If it passes, the candidate is tried again; when the harness then
fails once more with this candidate and with no other, the candidate is the cause and the status is its own.
A rank that SIGKILL ended counts as such a failure too: mostly it is the kernel that killed it, for memory that others took.
What broke once proves no speed: a candidate that can break a measurement could choose among several.
"""

from __future__ import annotations

from dataclasses import replace

import problems
from pkb_env.attempt import Attempt, Job, Result
from pkb_env.errors import HarnessError
from pkb_env.machine import Machine
from pkb_env.outcome import Outcome
from pkb_env.submission import Candidate
from pkb_env.told import clean
from rewards.verdict import Status

_TOLD_CHARS = 500
_OURS = HarnessError, OSError, problems.UnknownProblem
"""What is raised when something of ours failed, or the files of a pack have changed meanwhile."""
_AGAIN = "again: an attempt before this one broke: nothing is proven"


def run_with_blame(machine: Machine, job: Job) -> Result:
    """Attempt the job, retrying and asking the canary when the harness fails; never raises HarnessError."""
    for again in range(1 + machine.config.retries):
        result, broke = _tried(machine, job)
        if not broke:
            return _unproven(result) if again else result
        machine.pool.forget(job.task)
        if not canary_lives(machine, job):
            return Result(Outcome(Status.INFRA, "harness", f"the harness failed, with a known-good candidate too: {broke}", ()))
    return result


def _tried(machine: Machine, job: Job) -> tuple[Result, str]:
    """What one attempt gives if it is the candidate's fault, and how it broke; empty when it did not."""
    try:
        result = Attempt(machine, job).run()
    except _OURS as error:
        broke, times = clean(f"{error}", _TOLD_CHARS), 1 + machine.config.retries
        message = f"the evaluation broke {times} times with this candidate and never with a known-good one: {broke}"
        return Result(Outcome(Status.RUNTIME_ERROR, "run", message, ())), broke
    return result, result.outcome.message if result.outcome.killed else ""


def _unproven(result: Result) -> Result:
    return replace(result, proves=False, notes=(*result.notes, _AGAIN) if result.speed else result.notes)


def canary_lives(machine: Machine, job: Job) -> bool:
    """Whether the reference, submitted as a candidate under the same settings, comes out correct."""
    canary = Candidate(problems.reference_source(job.problem, on_gpu=bool(job.task.devices)))
    try:
        result = Attempt(machine, replace(job, candidate=canary, timed=False)).run()
    except _OURS:
        return False
    return result.outcome.status is Status.CORRECT
