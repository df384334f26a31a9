"""The answers that a store holds, and what came of them: of a run of `pkb evaluate`, or of any store; nothing is run.

Not here: making them (`policy_run`), what they say (`metrics`, `policy_report`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pkb_env.errors import UsageError
from pkb_env.metrics import Sample
from pkb_env.policy_run import SETTING, STORE, WHERE, drawn
from pkb_env.store import Store
from pkb_env.submission import Submission
from problems.base import Problem
from rewards.verdict import Status, Verdict


@dataclass(frozen=True)
class Outcome:
    """One answer, and what came of it."""

    sample: Sample
    verdict: Verdict | None = None
    row: int | None = None
    """Of the verdict in the store; both are None when the harness failed."""
    created: float | None = None


class Recording:
    """A folder that `pkb evaluate` wrote, or any store: there every candidate is one sample.

    Args:
        path: the folder, or the store's file.
        where: of any store the verdicts for this backend, world size, topology, profile and size are taken.

    Raises:
        UsageError: there is no store.
    """

    def __init__(self, path: Path, where: Submission) -> None:
        self._file, self._where = path / STORE if path.is_dir() else path, where
        if not self._file.is_file():
            made = "`pkb evaluate ... --out FOLDER` and `pkb eval --store FILE` make one"
            raise UsageError(f"there is no store at {self._file}; {made}")
        ours = self._file.with_name(SETTING)
        self._ours = self._file.name == STORE and ours.is_file()
        self.setting: dict[str, Any] = json.loads(ours.read_text(encoding="utf-8")) if self._ours else self._plain()

    def outcomes(self, problems: Sequence[Problem], most: int | None) -> list[Outcome]:
        """The first so many answers to each problem; None: all.

        Raises:
            UsageError: there is none.
        """
        store = Store(self._file)
        try:
            found = outcomes(store, problems) if self._ours else self._candidates(store, problems)
        finally:
            store.close()
        if not found:
            wanted = "these problems and settings; see --problems, --backend, --world-size, --topology, --size"
            raise UsageError(f"{self._file} holds no verdict of {wanted}")
        return [outcome for outcome in found if most is None or outcome.sample.sample < most]

    def _plain(self) -> dict[str, Any]:
        where = {name: getattr(self._where, name) for name in WHERE}
        return {"policy": {"kind": "store", "path": str(self._file)}, "problems": "all", **where, "turns": 1, "config": None}

    def _candidates(self, store: Store, problems: Sequence[Problem]) -> list[Outcome]:
        """The newest verdict of every candidate, in the order of their first ones."""
        columns = {name: getattr(self._where, name) for name in WHERE if name != "dtype"}
        found: list[Outcome] = []
        for problem in problems:
            rows = store.search(problem=problem.slug, problem_version=problem.version, **columns)
            newest = {row.verdict.digest: row for row in reversed(rows)}  # a dict keeps the first place and the last value
            found += [
                Outcome(Sample.of(row.verdict, i), row.verdict, row.id, row.created) for i, row in enumerate(newest.values())
            ]
        return found


def outcomes(store: Store, problems: Sequence[Problem]) -> list[Outcome]:
    """The answers of the run that a store holds."""
    slugs = {problem.number: problem.slug for problem in problems}
    return [
        _outcome(store, slugs[group], sample, turn, rollout.verdict)
        for (group, sample, turn), rollout in sorted(drawn(store).items()) if group in slugs
    ]  # fmt: skip


def _outcome(store: Store, slug: str, sample: int, turn: int, row: int | None) -> Outcome:
    if row is None:
        return Outcome(Sample(slug, sample, Status.INFRA, turn=turn))
    stored = store.get(row)
    return Outcome(Sample.of(stored.verdict, sample, turn), stored.verdict, row, stored.created)
