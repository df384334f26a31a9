"""The word list of outcomes: what an evaluation found, as frozen plain data.

The evaluator fills a `Verdict`, rewards read it, the store keeps it as JSON.  A verdict refuses numbers that do not go
with its status: "wrong, yet twice as fast" cannot be built.

Not here: how a verdict is reached (`pkb_env`), what it is worth (`rewards.presets`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from rewards.observed import Finding, Kernel, RankReport

__all__ = ["Finding", "Kernel", "RankReport", "Status", "Verdict"]

SCHEMA_VERSION = 1


class Status(StrEnum):
    """Closed list of outcomes; the list has no order (rewards use an explicit rank)."""

    INFRA = "INFRA"
    """The harness failed; never the candidate's fault, never a result, always unscored."""
    INVALID = "INVALID"
    """The text is not a candidate: no code, a syntax error, no `solution`, too large, or forbidden by the screen."""
    COMPILE_ERROR = "COMPILE_ERROR"
    """A compiler refused a source of the candidate, or ran past its deadline."""
    LOAD_ERROR = "LOAD_ERROR"
    """The candidate's module raised while it was imported."""
    RUNTIME_ERROR = "RUNTIME_ERROR"
    """A rank raised, exited or was killed by a signal."""
    DEADLOCK = "DEADLOCK"
    """At the deadline a rank waited for another one, or had already returned."""
    TIMEOUT = "TIMEOUT"
    """At the deadline every unfinished rank was still computing."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    """A rank hit its memory cap."""
    TAMPERED = "TAMPERED"
    """Outside evidence of cheating: a violated wire format, a wrong nonce, clocks that disagree."""
    WRONG_RESULT = "WRONG_RESULT"
    """Some rank's output is not the answer."""
    CORRECT = "CORRECT"
    """Every comparison of every trial, rank and output holds."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The frozen result of one evaluation.

    Raises:
        ValueError: numbers that do not go with the status.
    """

    status: Status
    stage: str
    """The station that decided: submission, screen, compile, load, run, judge, time, harness."""
    message: str
    """What came, what was expected, on which rank and line: fit to show a policy."""
    problem: str
    problem_version: int
    profile: str
    size: str
    world_size: int
    backend: str
    topology: str
    digest: str
    """SHA-256 of the candidate's source."""
    dtype: str = "float32"
    hardware: str = ""
    toolchain: str = ""
    comparable: bool = False
    """Whether times may be compared with other verdicts of the same hardware (never for oversubscribed ranks)."""
    ranks: tuple[RankReport, ...] = ()
    passed: float = 0.0
    """Share of (trial, rank, output) comparisons that hold, 0 to 1."""
    time_ms: float | None = None
    """Median time of the candidate's `solution`, from the last rank's beginning to the last one's return."""
    baselines: Mapping[str, float] = field(default_factory=dict)
    """Times in ms of other implementations, likewise; `reference` whenever time_ms is there."""
    speedup: float | None = None
    """Reference time over candidate time, from paired calls."""
    speedup_low: float | None = None
    speedup_high: float | None = None
    faster: bool = False
    """Whether the pairs prove that the candidate is faster than the reference."""
    pairs: int = 0
    """Timed pairs behind the speed-up, from `groups` fresh groups."""
    groups: int = 0
    skew: float | None = None
    """Median of (last rank - first rank) / call time."""
    first_call_ms: float | None = None
    bound_ms: float | None = None
    """Roofline of this problem, size and hardware, or None."""
    mechanisms: tuple[str, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    """The longest of the slowest rank, longest first; only where `EvalConfig.kernels` asked for them."""
    own_kernel_share: float | None = None
    """Share of their time that is in kernels of the candidate's own."""
    findings: tuple[Finding, ...] = ()
    walls: tuple[str, ...] = ()
    """The walls of the box that held during this evaluation."""
    notes: tuple[str, ...] = ()
    """Remarks on the measurement: oversubscribed, cache-hot, few pairs."""
    public_rule: bool | None = None
    """`profile="upstream"` only: whether the public benchmark's rule accepts the outputs."""
    stage_s: Mapping[str, float] = field(default_factory=dict)
    """Wall seconds of each stage."""
    schema: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "status", Status(self.status))
        for name in ("baselines", "stage_s"):
            object.__setattr__(self, name, dict(getattr(self, name)))
        for name in _TUPLES:
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if found := _contradictions(self):
            raise ValueError(f"verdict {self.status} of {self.problem}: {'; '.join(found)}")

    @property
    def correct(self) -> bool:
        """Whether the status is CORRECT."""
        return self.status is Status.CORRECT

    def but(self, **changes: Any) -> Verdict:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)

    def to_json(self) -> str:
        """One line of JSON; `from_json` gives an equal verdict back."""
        return json.dumps(asdict(self), sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Verdict:
        """Rebuild a verdict.

        Raises:
            ValueError: the text is not a verdict of this schema, or contradicts itself.
        """
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise ValueError(f"stored verdict is not JSON: {error}") from error
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA_VERSION:
            came = raw.get("schema") if isinstance(raw, dict) else type(raw).__name__
            raise ValueError(f"stored verdict has schema {came!r}, wanted {SCHEMA_VERSION}")
        if unknown := set(raw) - {f.name for f in fields(cls)}:
            raise ValueError(f"stored verdict has unknown fields {sorted(unknown)}")
        try:
            ranks = tuple(RankReport(**r) for r in raw.pop("ranks", ()))
            findings = tuple(Finding(**f) for f in raw.pop("findings", ()))
            kernels = tuple(Kernel(**k) for k in raw.pop("kernels", ()))
            return cls(**raw, ranks=ranks, findings=findings, kernels=kernels)
        except TypeError as error:
            raise ValueError(f"stored verdict has missing or malformed fields: {error}") from error


_TUPLES = ("ranks", "mechanisms", "kernels", "findings", "walls", "notes")
_TIMES = ("time_ms", "speedup", "speedup_low", "speedup_high", "skew", "bound_ms")


def _contradictions(v: Verdict) -> list[str]:
    """Everything in the verdict that cannot be true together."""
    failed = v.status is not Status.CORRECT
    found = [f"{name}={getattr(v, name)!r} needs CORRECT" for name in _TIMES[:-1] if failed and getattr(v, name) is not None]
    found += ["faster=True needs CORRECT"] if failed and v.faster else []
    if v.status not in (Status.CORRECT, Status.WRONG_RESULT) and v.passed:
        found.append(f"passed={v.passed!r} needs outputs that were judged")
    if not 0.0 <= v.passed <= 1.0:
        found.append(f"passed={v.passed!r} is no share")
    if (v.status is Status.CORRECT) != (v.passed == 1.0):
        found.append(f"passed={v.passed!r} contradicts the status")
    return found + _number_contradictions(v) + _rank_contradictions(v) + _speed_contradictions(v)


def _number_contradictions(v: Verdict) -> list[str]:
    numbers = {name: getattr(v, name) for name in (*_TIMES, "first_call_ms", "own_kernel_share")}
    for name in ("baselines", "stage_s"):
        numbers |= {f"{name}[{key!r}]": value for key, value in getattr(v, name).items()}
    return [
        f"{name}={value!r} is not a finite number >= 0"
        for name, value in numbers.items()
        if value is not None and not (math.isfinite(value) and value >= 0)
    ]


def _rank_contradictions(v: Verdict) -> list[str]:
    ranks = [r.rank for r in v.ranks]
    if len(set(ranks)) == len(ranks) and all(0 <= r < v.world_size for r in ranks):
        return []
    return [f"reports of ranks {ranks} do not go with world size {v.world_size}"]


def _speed_contradictions(v: Verdict) -> list[str]:
    parts = (v.speedup, v.speedup_low, v.speedup_high)
    found = []
    if (v.time_ms is not None or v.speedup is not None) and "reference" not in v.baselines:
        found.append("a time needs baselines['reference']")
    if any(p is None for p in parts):
        bad = v.faster or any(p is not None for p in parts)
        return [*found, "a speed-up needs its interval, and `faster` needs both"] if bad else found
    if v.time_ms is None:
        found.append("a speed-up needs time_ms")
    if not v.speedup_low <= v.speedup <= v.speedup_high:  # type: ignore[operator]
        found.append(f"speed-up {v.speedup} lies outside its interval [{v.speedup_low}, {v.speedup_high}]")
    if v.faster and v.speedup <= 1.0:  # type: ignore[operator]
        found.append(f"faster=True with speed-up {v.speedup}")
    return found
