"""The curve fast_p over p as a picture.

Not here: the numbers (`metrics`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pkb_env import figures


def draw(path: Path, told: dict[str, Any], title: str) -> None:
    """One line for every k of a report: the share of problems that one of k samples solves faster than p.

    Raises:
        UsageError: matplotlib is not installed.
    """
    figure = figures.blank(6.5, 4.5)
    axes = figure.subplots()
    for k, shares in told["curve"]["share"].items():
        known = [(p, share) for p, share in zip(told["curve"]["p"], shares, strict=True) if share is not None]
        marker, label = "" if len(known) > 1 else "o", f"k = {k}, {_problems(told, int(k))} problems"
        axes.step([p for p, _ in known], [share for _, share in known], where="post", marker=marker, label=label)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel="p: paid speed-up over the reference is above", ylabel="share of problems", xlim=(-0.02, 3), ylim=(0, 1))
    axes.set_title(title, fontsize=9)
    axes.legend()
    figure.savefig(path, dpi=120)


def _problems(told: dict[str, Any], k: int) -> int:
    """How many problems have k samples or more: the curves of two k may speak of different ones."""
    return next(int(rate["problems"]) for rate in told["groups"]["all"]["all"]["rates"] if rate["k"] == k)
