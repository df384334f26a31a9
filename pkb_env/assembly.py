"""From what an attempt found to a verdict: who, where, what, and the numbers that were earned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pkb_env import hardware, roofline, topology
from pkb_env.attempt import Result
from pkb_env.kernels import own_share
from pkb_env.machine import Machine
from pkb_env.screen import mechanisms
from pkb_env.submission import Candidate, Submission
from problems.base import Problem
from rewards.verdict import Finding, Status, Verdict


@dataclass(frozen=True)
class Case:
    """A submission that became a candidate."""

    submission: Submission
    problem: Problem
    candidate: Candidate
    findings: tuple[Finding, ...]

    def pending(self, machine: Machine) -> Verdict:
        """A stand-in for the verdict to come; it carries all that the store's key is made of."""
        return Verdict(Status.INFRA, "submission", "not evaluated", **self._described(machine))

    def verdict(self, machine: Machine, result: Result) -> Verdict:
        """The verdict of an attempt."""
        found = result.outcome
        return Verdict(
            found.status, found.stage, found.message, **self._described(machine), **self._timed(result), ranks=found.ranks,
            passed=result.passed, public_rule=result.public_rule, first_call_ms=result.first_call_ms,
            bound_ms=None if found.status is Status.INFRA else self._bound_ms(machine), stage_s=result.stage_s,
            walls=machine.walls, notes=result.notes + self._notes(), kernels=result.kernels,
            own_kernel_share=own_share(result.kernels),
        )  # fmt: skip

    def _notes(self) -> tuple[str, ...]:
        """What keeps the times from comparing with others."""
        crowded = ("oversubscribed: more ranks than cores",) if self._oversubscribed else ()
        return crowded + (("shared: the ranks take turns on one GPU",) if self.submission.topology == "shared" else ())

    def _bound_ms(self, machine: Machine) -> float | None:
        """None where nobody told the least cost, or ranks share one GPU: together they do not do W times what one can."""
        s = self.submission
        if s.topology == "shared" or "cost" in self.problem.unknown:
            return None
        cost = self.problem.cost(self.problem.size(s.size, s.profile), s.world_size, getattr(torch, s.dtype).itemsize)
        return roofline.bound_ms(cost, machine.peaks(s.topology))

    @property
    def _oversubscribed(self) -> bool:
        return self.submission.world_size > hardware.cores()

    def _described(self, machine: Machine) -> dict[str, Any]:
        s = self.submission
        return {
            "problem": self.problem.slug, "problem_version": self.problem.version, "profile": s.profile, "size": s.size,
            "world_size": s.world_size, "backend": s.backend, "topology": s.topology, "digest": self.candidate.digest,
            "dtype": s.dtype, "hardware": topology.hardware_name(s.topology),
            "toolchain": hardware.toolchain(machine.broker.versions(cuda=s.topology != "cpu")),
            "mechanisms": mechanisms(self.candidate), "findings": self.findings,
        }  # fmt: skip

    def _timed(self, result: Result) -> dict[str, Any]:
        speed = result.speed
        if speed is None:
            return {"comparable": False}
        return {
            "comparable": not self._notes(), "time_ms": speed.time_ms, "baselines": {"reference": speed.reference_ms},
            "speedup": speed.speedup, "speedup_low": speed.low, "speedup_high": speed.high, "faster": result.faster,
            "skew": speed.skew, "pairs": speed.pairs, "groups": speed.groups,
        }  # fmt: skip
