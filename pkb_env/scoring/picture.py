"""Two rewards on the same turns as a picture: values against values, and where advantages change their sign.

Not here: the numbers (`rescore`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pkb_env import figures
from pkb_env.scoring.rescore import Rescored
from rewards.verdict import Status


def draw(path: Path, first: Rescored, second: Rescored, statuses: Sequence[Status | None]) -> None:
    """Every turn by its value, and by its advantage, under both rewards, as the name ends: .png, .pdf or .svg.

    Raises:
        UsageError: matplotlib is not installed.
    """
    figure = figures.blank(11, 5)
    values, advantages = figure.subplots(1, 2)
    both = [i for i, pair in enumerate(zip(first.values, second.values, strict=True)) if None not in pair]
    for colour, status in enumerate(sorted({s for s in statuses if s is not None})):
        of_status = [i for i in both if statuses[i] is status]
        if of_status:
            _scatter(values, first.values, second.values, of_status, f"C{colour % 10}", f"{status}: {len(of_status)}")
            _scatter(advantages, first.advantages, second.advantages, of_status, f"C{colour % 10}", "")
    values.set(xlabel=f"{first.reward}: value", ylabel=f"{second.reward}: value")
    advantages.set(xlabel=f"{first.reward}: {first.advantage} advantage", ylabel=f"{second.reward}: {second.advantage} advantage")
    for line in (advantages.axhline, advantages.axvline):
        line(0.0, color="black", linewidth=0.8)
    if both:
        values.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _scatter(axes: Any, x: Sequence[float | None], y: Sequence[float | None], at: Sequence[int], colour: str, label: str) -> None:
    axes.scatter([x[i] for i in at], [y[i] for i in at], s=14, alpha=0.6, color=colour, label=label or None)
