"""From what a caller names (`"allreduce"`, a list, `"train"`, `"rung-1"`, `"train/rung-1"`) to problems.

Unknown names and unfit settings are UsageErrors.
Not here: the problems themselves, which rung each is on (`problems`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import problems
from pkb_env.errors import UsageError
from problems.base import PROFILES, SPLITS, Problem


def named(name: str) -> Problem:
    """One problem by slug, number or unique prefix.

    Raises:
        UsageError: no such problem, with what is close.
    """
    try:
        return problems.load(name)
    except problems.UnknownProblem as error:
        raise UsageError(str(error)) from None


def problem_set(wanted: str | Iterable[str]) -> tuple[Problem, ...]:
    """The problems of one name or of several names, by number.

    A name is a problem's, a split (`train`, `validation`, `test`), a rung of the ladder (`rung-1` to `rung-5`) or `all`;
    of names with `/` between them what they have in common, `train/rung-1`.

    Raises:
        UsageError: a name that does not exist, or nothing at all.
    """
    found = [problem for name in ([wanted] if isinstance(wanted, str) else wanted) for problem in _common(name)]
    if not found:
        raise UsageError(f"problem={wanted!r} names no problem; give a name, a list of names, a split, a rung or 'all'")
    return tuple(sorted({problem.slug: problem for problem in found}.values(), key=lambda problem: problem.number))


def fitting(found: Iterable[Problem], *, world_size: int, size: str, profile: str) -> tuple[Problem, ...]:
    """Those problems of a set that run on so many ranks.

    Raises:
        UsageError: no such profile or size, or none of the problems fits.
    """
    if profile not in PROFILES:
        raise UsageError(f"unknown profile {profile!r}; there are {', '.join(PROFILES)}")
    reasons, kept = [], []
    for problem in found:
        try:
            problem.size(size, profile)
        except KeyError as error:
            raise UsageError(error.args[0]) from None
        reason = problem.valid_world(world_size)
        reasons.append(f"{problem.slug}: {reason}")
        kept += [problem] if reason is None else []
    if not kept:
        raise UsageError(f"world size {world_size} fits none of the problems ({'; '.join(reasons[:3])})")
    return tuple(kept)


def _common(name: str) -> list[Problem]:
    first, *others = map(_of, name.split("/"))
    return [problem for problem in first if all(problem.slug in {each.slug for each in other} for other in others)]


def _of(name: str) -> list[Problem]:
    if name in SPLITS:
        return [problem for problem in map(problems.load, problems.names()) if problem.split == name]
    if name == "all":
        return [problems.load(each) for each in problems.names()]
    if match := re.fullmatch(r"rung-(\d+)", name):
        return _rung(int(match[1]))
    return [named(name)]


def _rung(number: int) -> list[Problem]:
    ladder = problems.ladder()
    if number not in ladder:
        raise UsageError(f"there is no rung-{number}; there are {', '.join(f'rung-{each}' for each in ladder)}")
    return ladder[number]
