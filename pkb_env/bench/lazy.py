"""How many problems each kind of lazy answer gets past the judge, and past the public check.  Arithmetic and text only.

Not here: the answers (`pkb_env.lazy`), the trials (`lazy_run`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pkb_env.markdown import table

TRUE = "dtype changed"
"""A right answer in a dtype that nobody asked for: no rule about values refuses it."""
RIGHT = "right answer"
"""`exact`, rounded once to the dtypes of the reference: what a perfect kernel gives."""
REFERENCE = "reference itself"
NOT_LAZY = frozenset({TRUE, RIGHT, REFERENCE})
ANY = f"any lazy one but `{TRUE}`"
CHECKS = ("public check", "judge")
_WORDS = frozenset({"answer", "problem", "profile", "size", *CHECKS, "not made", "why"})
_LEGEND = """\
- an answer counts for a problem when every rank's outputs hold in each of the trials, which end once all lazy ones but {true}
  are refused
- public check: |reference - answer| <= 0.01 + 0.01 * |answer| for every element, whatever the dtype; judge: that of this
  environment, which looks at outputs only here; arguments that must change or stay are judged besides when a candidate is
- `upstream`: the public benchmark's inputs; `hardened`: those that `pkb eval` and the environment draw unless told otherwise.
  Both are in {dtype} here; the public benchmark runs in bfloat16
- {right}, {reference}: not lazy; the exact values, rounded once, which a perfect kernel gives, and what the problem's reference
  gives.  The judge measures against the first, the public check against the second
- {true}: right values in a dtype that was not asked for, so every rule that is about values alone takes it
- sizes: {sizes}
"""


@dataclass(frozen=True)
class Row:
    """What became of the lazy answers to one problem under one profile."""

    problem: str
    profile: str
    size: str
    trials: int
    """How many were made: none after all but `NOT_LAZY` had been refused."""
    judge: tuple[str, ...] = ()
    """Kinds that the judge took in every trial."""
    public: tuple[str, ...] = ()
    """Kinds that the public check took in every trial."""
    not_made: Mapping[str, str] = field(default_factory=dict)
    """Kind -> why there is no such answer."""
    failed: str = ""
    """Why the problem could not be tried at all."""
    seconds: float = 0.0
    rank_bytes: int = 0
    """Most memory that a rank of the reference had."""

    def passing(self, check: str) -> tuple[str, ...]:
        """Kinds that one of `CHECKS` took."""
        return self.public if check == "public check" else self.judge


Count = dict[tuple[str, str], int]
"""(profile, check) -> number of problems."""


def counts(rows: Sequence[Row], kinds: Sequence[str]) -> dict[str, Count]:
    """For every kind, and for `ANY`, how many problems pass each check."""
    profiles = tuple(dict.fromkeys(row.profile for row in rows))
    columns = [(profile, check) for profile in profiles for check in CHECKS]
    found = {
        kind: {(profile, check): sum(kind in row.passing(check) for row in rows if row.profile == profile)
               for profile, check in columns}
        for kind in kinds
    }  # fmt: skip
    found[ANY] = {
        (profile, check): sum(bool(set(row.passing(check)) - NOT_LAZY) for row in rows if row.profile == profile)
        for profile, check in columns
    }
    return found


def markdown(rows: Sequence[Row], kinds: Sequence[str], told: Mapping[str, Any]) -> str:
    """The page: what made it and where, how many problems each kind passes, which ones, what the columns mean.

    Args:
        rows: each problem under each profile.
        kinds: lazy answers, in the order of the table.
        told: `command`, `hardware`, `torch`, `date`, `world_size`, `trials`, `dtype`, `seconds`, `peak_bytes`.
    """
    head = f"# Lazy answers on {told['hardware']}\n\nMade by `{told['command']}`; not edited by hand.\n"
    where = (
        f"torch {told['torch']}, {told['date']}, {told['world_size']} ranks, {told['trials']} trials; "
        f"took {told['seconds']:.0f} s and at most {told['peak_bytes'] / 2**20:.0f} MiB in one process.\n"
    )
    names = {"true": f"`{TRUE}`", "right": f"`{RIGHT}`", "reference": f"`{REFERENCE}`"}
    legend = _LEGEND.format(dtype=told["dtype"], sizes=sizes(rows), **names)
    return f"{head}\n{where}\n{summary(rows, kinds)}\n{legend}{_which(rows)}{_wronged(rows)}{_troubles(rows)}"


def summary(rows: Sequence[Row], kinds: Sequence[str]) -> str:
    """The table of numbers."""
    found = counts(rows, kinds)
    columns = list(next(iter(found.values())))
    tried = [sum(row.profile == profile and not row.failed for row in rows) for profile, _ in columns]
    heads = ["answer", *(f"{profile}, {check}, of {n}" for (profile, check), n in zip(columns, tried, strict=True))]
    return table(heads, [[kind, *(str(count[column]) for column in columns)] for kind, count in found.items()], _WORDS)


def sizes(rows: Sequence[Row]) -> str:
    """Which sizes were used, and which problems had to make do with a smaller one than their profile's."""
    said = []
    for profile in dict.fromkeys(row.profile for row in rows):
        used: dict[str, list[str]] = {}
        for row in rows:
            if row.profile == profile:
                used.setdefault(row.size, []).append(row.problem)
        usual = max(used, key=lambda size: len(used[size]))
        others = "; ".join(f"{', '.join(names)} have {size}" for size, names in used.items() if size != usual)
        said.append(f"`{profile}` has {usual}" + (f", but where that is too heavy for a CPU: {others}" if others else ""))
    return ".  ".join(said)


def _which(rows: Sequence[Row]) -> str:
    lines = [
        [row.problem, row.profile, *(", ".join(kind for kind in row.passing(check) if kind not in NOT_LAZY) for check in CHECKS)]
        for row in rows if (set(row.public) | set(row.judge)) - NOT_LAZY
    ]  # fmt: skip
    return f"\n## What passes\n\n{table(('problem', 'profile', *CHECKS), lines, _WORDS)}" if lines else ""


def _wronged(rows: Sequence[Row]) -> str:
    lines = [
        [row.problem, row.profile, *(", ".join(x for x in (RIGHT, REFERENCE) if x not in row.passing(check)) for check in CHECKS)]
        for row in rows if not row.failed and not {RIGHT, REFERENCE} <= set(row.public) & set(row.judge)
    ]  # fmt: skip
    heads = ("problem", "profile", *(f"{check} refuses" for check in CHECKS))
    return f"\n## What is refused although it is not lazy\n\n{table(heads, lines, heads)}" if lines else ""


def _troubles(rows: Sequence[Row]) -> str:
    lines = [[row.problem, row.profile, kind, why] for row in rows for kind, why in row.not_made.items()]
    lines += [[row.problem, row.profile, "all", row.failed] for row in rows if row.failed]
    return f"\n## What could not be tried\n\n{table(('problem', 'profile', 'not made', 'why'), lines, _WORDS)}" if lines else ""
