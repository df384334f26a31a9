"""An evaluator that runs nothing: it answers from a store.  For reward research, `check_env` and machines without compilers.

Texts that are no candidate are refused as everywhere; for a candidate the newest stored verdict of the same source,
problem and settings is the answer, on whatever hardware it was measured.

Not here: evaluating (`evaluator`), storing (`store`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, Self

from pkb_env import topology
from pkb_env.errors import InvalidSource, UsageError
from pkb_env.problem_set import named
from pkb_env.screen import check, screen
from pkb_env.store import Store
from pkb_env.submission import Candidate, Submission, invalid, read
from rewards.verdict import Finding, Status, Verdict

_LOG = logging.getLogger(__name__)


class RecordedEvaluator:
    """Answers from a store.

    Args:
        store: an open store, or the path of one that exists.
        missing: what a submission without a stored verdict gives: `error` raises, `unscored` gives an INFRA verdict.

    Raises:
        UsageError: no such file, or `missing` is neither of the two.
    """

    def __init__(self, store: Store | str | os.PathLike[str], missing: Literal["error", "unscored"] = "error") -> None:
        if missing not in ("error", "unscored"):
            raise UsageError(f"missing={missing!r} is neither 'error' nor 'unscored'")
        if not isinstance(store, Store) and not os.path.exists(store):
            raise UsageError(f"there is no store at {os.fspath(store)!r}; record one with `pkb eval --store`")
        self._owned = not isinstance(store, Store)
        self._store = store if isinstance(store, Store) else Store(store)
        self._missing = missing

    def __reduce__(self) -> tuple[object, ...]:
        return RecordedEvaluator, (self._store.path, self._missing)

    def evaluate(self, submission: Submission) -> Verdict:
        """The stored verdict.

        Raises:
            UsageError: no such problem, or nothing is stored and `missing` is `error`.
        """
        problem = named(submission.problem)
        where = topology.named(submission.topology, submission.world_size)
        submission, version = replace(submission, problem=problem.slug, topology=where), problem.version
        findings: tuple[Finding, ...] = ()
        try:
            candidate = read(submission.text)
            check(findings := screen(candidate, submission.backend))
        except InvalidSource as error:
            return invalid(submission, version, error, findings=findings)
        found = self._store.search(limit=1, **_columns(submission, version, candidate))
        return found[0].verdict if found else self._miss(submission, version, candidate)

    @property
    def waited_s(self) -> float:
        """Nothing waits here."""
        return 0.0

    def evaluate_many(self, submissions: Iterable[Submission], deadline_s: float | None = None) -> list[Verdict]:  # noqa: ARG002
        """Verdicts in the order of the submissions."""
        return [self.evaluate(submission) for submission in submissions]

    def close(self) -> None:
        """Close the store if this evaluator opened it."""
        if self._owned:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _miss(self, submission: Submission, version: int, candidate: Candidate) -> Verdict:
        columns = _columns(submission, version, candidate)
        what = ", ".join(f"{name}={str(value)[:12]}" for name, value in columns.items())
        if self._missing == "error":
            raise UsageError(f"the store holds no verdict for {what}; evaluate it first, or use missing='unscored'")
        _LOG.warning("unscored: no recorded verdict for %s", what)
        return Verdict(
            status=Status.INFRA, stage="harness", message=f"no recorded verdict for {what}", **columns  # type: ignore[arg-type]
        )


def _columns(submission: Submission, version: int, candidate: Candidate) -> dict[str, str | int]:
    return {
        "digest": candidate.digest,
        "problem": submission.problem,
        "problem_version": version,
        "profile": submission.profile,
        "size": submission.size,
        "world_size": submission.world_size,
        "backend": submission.backend,
        "topology": submission.topology,
    }
