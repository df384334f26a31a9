"""Whose fault is it when the harness fails while a candidate runs?

A failure is first laid at the harness's door: a known-good canary (the reference's own source, in a fresh box) is run.
If the canary fails, the machine is at fault: INFRA.  If it passes, the candidate is tried again; when the harness then
fails once more with this candidate and with no other, the candidate is the cause and the status is its own.
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


def run_with_blame(machine: Machine, job: Job) -> Result:
    """Attempt the job, retrying and asking the canary when the harness fails; never raises HarnessError."""
    failure = HarnessError("not attempted")
    for _ in range(1 + machine.config.retries):
        try:
            return Attempt(machine, job).run()
        except (HarnessError, OSError) as error:
            failure = HarnessError(clean(f"{error}", _TOLD_CHARS))
        if not canary_lives(machine, job):
            return Result(Outcome(Status.INFRA, "harness", f"the harness failed, with a known-good candidate too: {failure}", ()))
    return Result(Outcome(
        Status.RUNTIME_ERROR, "run",
        f"the evaluation broke {1 + machine.config.retries} times with this candidate and never with a known-good one: {failure}",
        (),
    ))  # fmt: skip


def canary_lives(machine: Machine, job: Job) -> bool:
    """Whether the reference, submitted as a candidate under the same settings, comes out correct."""
    canary = Candidate(problems.reference_source(job.problem))
    try:
        result = Attempt(machine, replace(job, candidate=canary, timed=False)).run()
    except (HarnessError, OSError):
        return False
    return result.outcome.status is Status.CORRECT
