"""Takes readings of references against themselves, in rounds over the problems, and keeps each one as it comes.

A reading is a whole evaluation with the budget of a real one.  There is no store, every source is another text, and a
reading whose pairs were not timed is refused, so none is ever a remembered one.
Not here: what the readings say (`null`).
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pkb_env import hardware, topology
from pkb_env.bench import texts
from pkb_env.bench.null import Reading
from pkb_env.config import EvalConfig
from pkb_env.errors import HarnessError, UsageError
from pkb_env.evaluator import Evaluator
from pkb_env.load import Meter
from pkb_env.submission import Submission


@dataclass(frozen=True)
class Plan:
    """What is read, and how often."""

    problems: tuple[str, ...]
    readings: int
    """Of each problem."""
    world_size: int = 2
    size: str = "default"
    config: EvalConfig = field(default_factory=EvalConfig)
    topology: str = "cpu"

    def setting(self) -> dict[str, Any]:
        """What readings must have in common to be pooled."""
        return {
            "hardware": topology.hardware_name(self.topology), "harness": hardware.harness(), "topology": self.topology,
            "world_size": self.world_size, "size": self.size, "config": self.config.model_dump(mode="json"),
        }  # fmt: skip


class Notebook:
    """Readings in a folder, one JSON object a line; without a folder they are kept in memory.

    Raises:
        UsageError: the folder holds readings that were taken under other settings.
    """

    def __init__(self, folder: Path | None, setting: dict[str, Any]) -> None:
        self.readings: list[Reading] = []
        self._path = folder / "readings.jsonl" if folder else None
        if folder is not None and self._path is not None:
            folder.mkdir(parents=True, exist_ok=True)
            _agree(folder / "setting.json", setting)
            self.readings = _read(self._path)

    def add(self, reading: Reading) -> None:
        """Keep a reading; it survives whatever comes after."""
        self.readings.append(reading)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(reading)) + "\n")


def _agree(path: Path, setting: dict[str, Any]) -> None:
    if not path.exists():
        path.write_text(json.dumps(setting, indent=1), encoding="utf-8")
        return
    there = json.loads(path.read_text(encoding="utf-8"))
    different = sorted(name for name in setting if there.get(name) != setting[name])
    if different:
        pairs = "; ".join(f"{name} was {there.get(name)!r}, is {setting[name]!r}" for name in different)
        raise UsageError(f"{path.parent} holds readings of other settings ({pairs}): name another folder")


def _read(path: Path) -> list[Reading]:
    """The complete lines of a notebook; a last one that was cut short is removed."""
    if not path.exists():
        return []
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if whole != raw:
        os.truncate(path, len(whole))
    return [Reading(**json.loads(line)) for line in whole.splitlines()]


def take(plan: Plan, notebook: Notebook, heard: Callable[[Reading], None] = lambda _: None) -> None:
    """Take the readings that the notebook still lacks; `heard` is told of each new one.

    Raises:
        HarnessError: a verdict came without a timed stage, though it carries a speed-up.
    """
    there = Counter(reading.problem for reading in notebook.readings)
    todo = [name for number in range(plan.readings) for name in plan.problems if there[name] <= number]
    if not todo:
        return
    with Evaluator(plan.config) as evaluator:
        evaluator.machine().broker.prepared()  # so that the first reading is not charged with the start
        for name in todo:
            reading = _reading(evaluator, plan, name)
            notebook.add(reading)
            heard(reading)


def _reading(evaluator: Evaluator, plan: Plan, problem: str) -> Reading:
    assert evaluator.store is None
    text = texts.unique(texts.reference(problem), f"null reading {secrets.token_hex(8)}")
    at, start = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    with Meter() as meter:  # through `evaluate_many`, which an interrupt leaves without a trace
        asked = Submission(text, problem, world_size=plan.world_size, size=plan.size, topology=plan.topology)
        verdict = evaluator.evaluate_many([asked])[0]
    seconds = time.monotonic() - start
    if verdict.speedup is not None and not 0 < verdict.stage_s.get("time", 0.0) <= seconds:
        raise HarnessError(f"a reading of {problem} carries a speed-up that was not measured just now: stages {verdict.stage_s}")
    return Reading(
        problem=problem, status=verdict.status.value, speedup=verdict.speedup, low=verdict.speedup_low,
        high=verdict.speedup_high, faster=verdict.faster, time_ms=verdict.time_ms,
        reference_ms=verdict.baselines.get("reference"), seconds=round(seconds, 4),
        other_load=round(meter.load.other, 4), digest=verdict.digest, at=at,
        message="" if verdict.correct else verdict.message, stage_s=dict(verdict.stage_s),
    )  # fmt: skip
