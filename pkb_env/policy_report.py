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

Not here: the arithmetic (`metrics`), reading the store (`policy_record`), tables (`cli`), the picture (`policy_curve`).
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from pkb_env import hardware
from pkb_env.metrics import THRESHOLDS, Asked, Sample, best_of_turns, curve, summarise
from pkb_env.policy_record import Outcome
from pkb_env.policy_run import WHERE
from problems.base import Problem

SCHEMA = 1
GRID = tuple(step / 20 for step in range(61))
"""The p of the curve: 0 to 3."""
_SETTING = (*WHERE, "samples", "turns", "config")
_MESSAGE = 300


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
