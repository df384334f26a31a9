"""From what a caller names (`"allreduce"`, a list, `"train"`, `"rung-1"`, `"train/rung-1"`) to problems.

Unknown names and unfit settings are UsageErrors.
Not here: the problems themselves, which rung each is on (`problems`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import problems
from pkb_env.errors import UsageError
from problems.base import PROFILES, SPLITS, Problem

if TYPE_CHECKING:
    from problems.packs import Pack

_SET = re.compile("|".join(("all", *SPLITS, r"rung-\d+")))
"""What no pack can be called."""


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
    of names with `/` between them, a set's first, what they have in common, `train/rung-1`.  `pack/all` and `pack/train` are a
    pack's; without a pack both mean the problems of this repository.

    Raises:
        UsageError: a name that does not exist, or nothing at all.
    """
    found = [problem for name in ([wanted] if isinstance(wanted, str) else wanted) for problem in _common(name)]
    if not found:
        raise UsageError(f"problem={wanted!r} names no problem; give a name, a list of names, a split, a rung or 'all'")
    return tuple(sorted({problem.slug: problem for problem in found}.values(), key=_order))


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


def load_pack(path: str | os.PathLike[str]) -> Pack:
    """The pack in a folder.

    Raises:
        UsageError: it is none, or cannot be used.
    """
    try:
        return problems.load_pack(path)
    except problems.UnknownProblem as error:
        raise UsageError(str(error)) from None


def broken(path: str | os.PathLike[str] | None) -> list[str]:
    """Which problems of the pack in a folder cannot be used, and why; none without a folder."""
    pack = load_pack(path) if path else None
    return [f"{pack.name}/{slug} cannot be used: {why}" for slug, why in pack.broken.items()] if pack else []


def _common(name: str) -> list[Problem]:
    parts = name.split("/")
    if not _SET.fullmatch(parts[0]):
        return _of(name)
    first, *others = map(_of, parts)
    return [problem for problem in first if all(problem.slug in {each.slug for each in other} for other in others)]


def _of(name: str) -> list[Problem]:
    where, _, kind = name.rpartition("/")
    if where and kind in (*SPLITS, "all"):
        return [problem for problem in _of_pack(where) if kind in ("all", problem.split)]
    if name in SPLITS:
        return [problem for problem in map(problems.load, problems.names()) if problem.split == name]
    if name == "all":
        return [problems.load(each) for each in problems.names()]
    if match := re.fullmatch(r"rung-(\d+)", name):
        return _rung(int(match[1]))
    return [named(name)]


def _of_pack(where: str) -> list[Problem]:
    from problems import packs  # noqa: PLC0415  only where there is one

    try:
        pack = packs.of(where)
        return [pack.load(slug) for slug in pack.problems]
    except problems.UnknownProblem as error:
        raise UsageError(str(error)) from None


def _order(problem: Problem) -> tuple[str, int, str]:
    """Those of this repository first, packs one after the other, each by number."""
    return problem.pack.path if problem.pack else "", problem.number, problem.slug


def _rung(number: int) -> list[Problem]:
    ladder = problems.ladder()
    if number not in ladder:
        raise UsageError(f"there is no rung-{number}; there are {', '.join(f'rung-{each}' for each in ladder)}")
    return ladder[number]
