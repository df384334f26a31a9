"""What candidates earned, as tables: by family, and by mistake what was expected and what came.

Not here: evaluating (`training.verified`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from training.candidates.drafts import Draft

RIGHT = ("CORRECT", "COMPILED")
"""What a candidate without a mistake must earn: the second where there was nothing to run it on."""


@dataclass(frozen=True)
class Earned:
    """A candidate and what came of it."""

    draft: Draft
    status: str
    faster: bool = False
    """Proven faster than the reference."""
    busy: bool = False
    """Timed while others kept the machine busy, so that nothing could be proven."""
    seconds: float | None = None
    """What its evaluation took."""
    message: str = ""


def failures(found: Sequence[Earned]) -> list[Earned]:
    """Candidates that were meant to be right and are not: the generator is wrong."""
    return [each for each in found if not each.draft.flaw and each.status not in (*RIGHT, "INFRA")]


def table(found: Sequence[Earned]) -> str:
    """Both tables as text."""
    return "\n".join([*_families(found), "", *_mistakes(found), *_busy(found)])


def _families(found: Sequence[Earned]) -> list[str]:
    lines = [f"{'family':<28}{'problem':<42}{'n':>5}{'honest':>8}{'right':>7}{'faster':>8}{'mistaken':>10}{'s each':>8}"]
    for family, problem in dict.fromkeys((e.draft.family, e.draft.problem) for e in found):
        lines.append(_family(family, problem, [e for e in found if (e.draft.family, e.draft.problem) == (family, problem)]))
    return [*lines, _family("all", "", found)]


def _family(family: str, problem: str, found: Sequence[Earned]) -> str:
    honest = [each for each in found if not each.draft.flaw]
    right, faster = sum(e.status in RIGHT for e in honest), sum(e.faster for e in honest)
    times = [each.seconds for each in found if each.seconds is not None]
    mean = f"{sum(times) / len(times):.1f}" if times else "-"
    counts = f"{len(found):>5}{len(honest):>8}{right:>7}{faster:>8}{len(found) - len(honest):>10}{mean:>8}"
    return f"{family:<28}{problem:<42}{counts}"


def _busy(found: Sequence[Earned]) -> list[str]:
    busy, right = sum(each.busy for each in found), sum(each.status == "CORRECT" for each in found)
    return ["", f"{busy} of {right} correct ones were timed while others kept the machine busy: unproven"] if busy else []


def _mistakes(found: Sequence[Earned]) -> list[str]:
    lines = [f"{'mistake':<42}{'n':>4}  {'expected':<16}earned"]
    flaws = Counter((each.draft.flaw, each.draft.expected) for each in found if each.draft.flaw)
    for (name, expected), count in sorted(flaws.items()):
        came = Counter(each.status for each in found if each.draft.flaw == name and each.draft.expected == expected)
        lines.append(f"{name:<42}{count:>4}  {expected:<16}{', '.join(f'{s} {n}' for s, n in came.most_common())}")
    return lines if flaws else []
