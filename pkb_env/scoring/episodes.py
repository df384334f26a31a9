"""From rows of the store to episodes: the verdicts of one sample's turns, and which samples answered one prompt.

A store that holds verdicts alone gives every verdict as an episode of one turn, the answer to the task's prompt; those of one
problem, evaluated alike, on whatever machine, are one group.

Not here: what they are worth (`rescore`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from pkb_env.errors import UsageError
from pkb_env.problem_set import named
from pkb_env.prompt import task_prompt
from pkb_env.rows import Rollout
from pkb_env.store import Store
from pkb_env.submission import Submission
from rewards.verdict import Verdict

Group = tuple[str | int, ...]
"""Run, step and number of the group; or what evaluations of one problem have in common."""


@dataclass(frozen=True)
class Episode:
    """One sample: a policy's turns at one prompt."""

    group: Group
    turns: tuple[Rollout, ...]
    verdicts: tuple[Verdict | None, ...]
    """Of every turn; None where it is unscored."""


def episodes(store: Store, run: str | None = None) -> list[Episode]:
    """All episodes of a store, or of one run, in the order in which they began.

    Raises:
        UsageError: no such run, or nothing at all.
    """
    rows = store.graded(run)
    if not rows and run is not None:
        there = ", ".join(store.runs()) or "none"
        raise UsageError(f"{store.path} holds no rollouts of run {run!r}; runs in it: {there}")
    found = _by_sample(rows) if rows else _alone(store)
    if not found:
        raise UsageError(f"{store.path} holds neither rollouts nor verdicts; evaluate something with --store first")
    return found


def _by_sample(rows: Iterable[tuple[Rollout, Verdict | None]]) -> list[Episode]:
    samples: dict[tuple[Group, int], list[tuple[Rollout, Verdict | None]]] = {}
    for rollout, verdict in rows:
        samples.setdefault(((rollout.run, rollout.step, rollout.group), rollout.sample), []).append((rollout, verdict))
    return [_episode(group, turns) for (group, _), turns in samples.items()]


def _episode(group: Group, turns: list[tuple[Rollout, Verdict | None]]) -> Episode:
    in_order = sorted(turns, key=lambda turn: turn[0].turn)
    return Episode(group, tuple(rollout for rollout, _ in in_order), tuple(verdict for _, verdict in in_order))


@cache
def _prompt(problem: str, profile: str, size: str, world_size: int, backend: str, topology: str) -> str:
    """What was asked for; empty where the problem, a pack's say, is not to be had."""
    asked = Submission("", problem, backend, world_size, topology, profile, size)
    try:
        return task_prompt(named(problem), asked)
    except (UsageError, KeyError):
        return ""


def _alone(store: Store) -> list[Episode]:
    found: list[Episode] = []
    for row in reversed(store.search()):
        v = row.verdict
        group = (v.problem, v.profile, v.size, v.world_size, v.backend, v.topology)
        rollout = Rollout("verdicts", 0, 0, 0, _prompt(*group), row.source, row.id, len(found))
        found.append(Episode(group, (rollout,), (v,)))
    return found
