"""What an evaluation of a policy found, as one JSON object: `report.json`.

    schema      1
    policy      kind, name and sampling: what decided the answers
    setting     backend, world_size, topology, profile, size, dtype, samples (asked for, of each problem), turns,
                config (`EvalConfig`)
    made        date (UTC), command, harness, python, torch: who wrote this file
    measured    hardware, toolchain, walls: of all verdicts; first, last: when they were kept (UTC)
    unfit       problems of the set that do not run on so many ranks; nothing else here speaks of them
    ks, ps      the k and p of every rate
    groups      {"all" | "family" | "split": {name: summary}}, of first answers.  A summary: problems, missing (names), samples,
                infra, untimed, statuses {status: samples}, mechanisms {name: {samples, correct}}, rates [{p, k, share, low, high,
                reached, problems, too_few}]; `pkb_env/metrics.py` says what each means
    turns       only with several turns: [{turns, summary of all}], the best of the first 1, 2, ... turns
    curve       {"p": [...], "share": {k: [...]}}: fast_p@k for the picture
    problems    [{problem, number, family, split, samples, infra, untimed, statuses, reached {p: samples}, best}], of first
                answers; best is the highest speed-up that is paid
    outcomes    [{problem, sample, turn, status, paid, speedup, low, high, faster, comparable, digest, verdict, message}]: every
                answer; `verdict` is its row in the store, null when the harness failed

Not here: the arithmetic (`metrics`), tables (`cli`), the picture (`policy_curve`).
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pkb_env import hardware
from pkb_env.errors import UsageError
from pkb_env.metrics import THRESHOLDS, Asked, Sample, best_of_turns, curve, summarise
from pkb_env.policy_run import RUN, SETTING, STORE, drawn
from pkb_env.store import Store
from pkb_env.submission import Submission
from problems.base import Problem
from rewards.verdict import Status, Verdict

SCHEMA = 1
GRID = tuple(step / 20 for step in range(61))
"""The p of the curve: 0 to 3."""
_SETTING = ("backend", "world_size", "topology", "profile", "size", "dtype", "samples", "turns", "config")
_MESSAGE = 300


@dataclass(frozen=True)
class Outcome:
    """One answer, and what came of it."""

    sample: Sample
    verdict: Verdict | None = None
    row: int | None = None
    """Of the verdict in the store; both are None when the harness failed."""
    created: float | None = None


def outcomes(store: Store, problems: Sequence[Problem], most: int) -> list[Outcome]:
    """The first so many answers to each problem of the run that a store holds."""
    slugs = {problem.number: problem.slug for problem in problems}
    return [
        _outcome(store, slugs[group], sample, turn, rollout.verdict)
        for (group, sample, turn), rollout in sorted(drawn(store).items()) if group in slugs and sample < most
    ]  # fmt: skip


def recorded(path: Path, problems: Sequence[Problem], where: Submission, most: int) -> tuple[dict[str, Any], list[Outcome]]:
    """Setting and outcomes of a folder that `pkb evaluate` wrote, or of any store: there every candidate is one sample.

    Raises:
        UsageError: no store is there, or it holds nothing that was asked for.
    """
    file = path / STORE if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"there is no store at {file}; `pkb evaluate ... --out FOLDER` and `pkb eval --store FILE` make one")
    store = Store(file)
    try:
        ours = file.with_name(SETTING)
        if ours.is_file() and store.rollouts(RUN):
            setting, found = json.loads(ours.read_text(encoding="utf-8")), outcomes(store, problems, most)
        else:
            setting, found = _plain_setting(file, where, most), _candidates(store, problems, where, most)
    finally:
        store.close()
    if not found:
        raise UsageError(f"{file} holds no verdict of these problems and settings; see --problems, --backend, --world-size")
    return setting, found


def report(
    setting: dict[str, Any],
    problems: Sequence[Problem],
    found: Sequence[Outcome],
    ks: Sequence[int],
    *,
    unfit: Sequence[str] = (),
    command: str = "",
) -> dict[str, Any]:
    """The object (its form: the head of this module)."""
    asked = [Asked(problem.slug, problem.family, problem.split) for problem in problems]
    samples = [outcome.sample for outcome in found]
    first = [sample for sample in samples if sample.turn == 0]
    groups = summarise(asked, first, ks)
    turns = range(1, setting["turns"] + 1) if setting["turns"] > 1 else ()
    best = ((so_many, summarise(asked, best_of_turns(samples, so_many), ks)["all"]["all"]) for so_many in turns)
    return {
        "report": "policy evaluation", "schema": SCHEMA, "policy": setting["policy"],
        "setting": {name: setting[name] for name in _SETTING}, "made": _made(command), "measured": _measured(found),
        "unfit": list(unfit), "ks": list(ks), "ps": list(THRESHOLDS),
        "groups": {kind: {name: asdict(each) for name, each in of.items()} for kind, of in groups.items()},
        "turns": [{"turns": so_many, "all": asdict(summary)} for so_many, summary in best],
        "curve": {"p": list(GRID), "share": {str(k): curve(asked, first, k, GRID) for k in ks}},
        "problems": [_problem(problem, [s for s in first if s.problem == problem.slug]) for problem in problems],
        "outcomes": [_line(outcome) for outcome in found],
    }  # fmt: skip


def _outcome(store: Store, slug: str, sample: int, turn: int, row: int | None) -> Outcome:
    if row is None:
        return Outcome(Sample(slug, sample, Status.INFRA, turn=turn))
    stored = store.get(row)
    return Outcome(Sample.of(stored.verdict, sample, turn), stored.verdict, row, stored.created)


def _candidates(store: Store, problems: Sequence[Problem], where: Submission, most: int) -> list[Outcome]:
    """The newest verdict of every candidate under the settings that were asked for, in the order of their first ones."""
    columns = {name: getattr(where, name) for name in ("backend", "world_size", "topology", "profile", "size")}
    found: list[Outcome] = []
    for problem in problems:
        rows = store.search(problem=problem.slug, problem_version=problem.version, **columns)
        newest = {row.verdict.digest: row for row in reversed(rows)}  # a dict keeps the first place and the last value
        taken = list(newest.values())[:most]
        found += [Outcome(Sample.of(row.verdict, i), row.verdict, row.id, row.created) for i, row in enumerate(taken)]
    return found


def _plain_setting(file: Path, where: Submission, most: int) -> dict[str, Any]:
    told = {name: getattr(where, name) for name in ("backend", "world_size", "topology", "profile", "size", "dtype")}
    return {"policy": {"kind": "store", "path": str(file)}, **told, "samples": most, "turns": 1, "config": None}


def _made(command: str) -> dict[str, str]:
    date = datetime.now(UTC).isoformat(timespec="seconds")
    versions = {"harness": hardware.harness(), "python": platform.python_version(), "torch": metadata.version("torch")}
    return {"date": date, "command": command, **versions}


def _measured(found: Sequence[Outcome]) -> dict[str, Any]:
    verdicts = [outcome.verdict for outcome in found if outcome.verdict is not None]
    times = sorted(outcome.created for outcome in found if outcome.created is not None)
    ends = [datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds") for at in (*times[:1], *times[-1:])]
    return {
        "hardware": sorted({v.hardware for v in verdicts} - {""}), "toolchain": sorted({v.toolchain for v in verdicts} - {""}),
        "walls": sorted({wall for v in verdicts for wall in v.walls}), "first": ends[0] if ends else None,
        "last": ends[-1] if ends else None,
    }  # fmt: skip


def _problem(problem: Problem, samples: Sequence[Sample]) -> dict[str, Any]:
    counted = [sample for sample in samples if sample.counted]
    return {
        "problem": problem.slug, "number": problem.number, "family": problem.family, "split": problem.split,
        "samples": len(counted), "infra": len(samples) - len(counted),
        "untimed": sum(s.correct and s.paid is None for s in counted),
        "statuses": {status.value: count for status, count in sorted(Counter(s.status for s in counted).items())},
        "reached": {f"{p:g}": sum(s.reaches(p) for s in counted) for p in THRESHOLDS},
        "best": max((s.paid for s in counted if s.paid is not None), default=None),
    }  # fmt: skip


def _line(outcome: Outcome) -> dict[str, Any]:
    s, v = outcome.sample, outcome.verdict
    return {
        "problem": s.problem, "sample": s.sample, "turn": s.turn, "status": s.status.value, "paid": s.paid,
        "speedup": v and v.speedup, "low": v and v.speedup_low, "high": v and v.speedup_high, "faster": v and v.faster,
        "comparable": v and v.comparable, "digest": v and v.digest, "verdict": outcome.row, "message": v and v.message[:_MESSAGE],
    }  # fmt: skip
