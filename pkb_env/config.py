"""Everything that can be turned: deadlines in seconds, caps in bytes, how often a candidate is called."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt


def cache_dir() -> Path:
    """Where compiled artefacts and the default store live: `$PKB_CACHE`, else the user's cache folder."""
    root = os.environ.get("PKB_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "pkb")
    return Path(root)


class EvalConfig(BaseModel):
    """How a candidate is evaluated; the same for every submission of one evaluator."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trials: PositiveInt = Field(3, description="untimed calls on secret inputs, each judged on every rank")
    pairs: int = Field(384, ge=0, description="most timed pairs of a group, at least 5; 0 measures no time")
    time_budget_s: PositiveFloat = Field(1.5, description="most seconds spent on the timed pairs of a group")
    precision: PositiveFloat = Field(0.1, description="relative width of the interval, high/low - 1, at which timing ends")
    judged_pairs: int = Field(6, ge=0, description="timed calls judged too, before the first look; half as many later")
    straggler: bool = Field(default=True, description="two more calls with no pause between them, and late ranks")
    kernels: bool = Field(default=False, description="GPUs only: one more call, under torch's profiler, tells which kernels ran")
    load_deadline_s: PositiveFloat = Field(20.0, description="import of the candidate's module, compilers not counted")
    call_deadline_s: PositiveFloat = Field(10.0, description="one call of `solution`, slowest rank")
    compile_deadline_s: PositiveFloat = Field(60.0, description="one compiler run of a plain C++ source")
    extension_deadline_s: PositiveFloat = Field(400.0, description="one compiler run that includes torch's headers")
    rank_memory_bytes: PositiveInt = Field(
        3 << 30, description="what one rank may allocate beyond what it starts with, at most its share of 70 % of memory"
    )
    symmetric_bytes: PositiveInt = Field(256 << 20, description="symmetric memory of one rank")
    disk_bytes: PositiveInt = Field(64 << 20, description="largest file a rank may write")
    output_chars: PositiveInt = Field(4000, description="characters kept of what a rank prints")
    slots: int = Field(0, ge=0, description="evaluations at once; 0 derives it from cores and world size")
    retries: int = Field(1, ge=0, le=2, description="how often an evaluation is repeated when the harness failed")
    gpus: tuple[NonNegativeInt, ...] = Field((), description="GPUs that ranks may use, by number; empty: all")
    require_walls: tuple[str, ...] = Field((), description="refuse to run when one of these walls does not hold here")
    keep_open: tuple[str, ...] = Field((), description="walls switched off on purpose; for tests of the walls only")

    @classmethod
    def of(cls, given: EvalConfig | Mapping[str, Any] | None) -> EvalConfig:
        """Settings as they may be given: the object, a mapping, or None for the defaults."""
        return given if isinstance(given, EvalConfig) else cls(**(given or {}))
