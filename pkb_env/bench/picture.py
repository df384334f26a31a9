"""The readings of a null test as a picture.

Not here: the numbers (`null`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pkb_env import figures
from pkb_env.bench.null import BEYOND, GROUPS, Reading, group

_COLOURS = ("tab:blue", "tab:orange", "tab:red")


def draw(path: Path, readings: Sequence[Reading], title: str) -> None:
    """Every speed-up against the load of others, and their distribution by group of load, as a PNG.

    Raises:
        UsageError: matplotlib is not installed.
    """
    timed = [r for r in readings if r.speedup is not None]
    figure = figures.blank(11, 4.5)
    cloud, steps = figure.subplots(1, 2)
    figure.suptitle(title, fontsize=9)
    for (name, _), colour in zip(GROUPS, _COLOURS, strict=True):
        of_group = [r for r in timed if group(r.other_load) == name]
        if of_group:
            _scatter(cloud, of_group, colour, f"load of others {name}: {len(of_group)}")
            _distribution(steps, of_group, colour)
    cloud.set(xlabel="cores busy with others", ylabel="speed-up of a reference over itself")
    steps.set(xlabel="speed-up of a reference over itself", ylabel="share of readings at or below")
    cloud.axhline(1.0, color="black", linewidth=0.8)
    for value in (1 / BEYOND, 1.0, BEYOND):
        steps.axvline(value, color="black", linewidth=0.8, linestyle="-" if value == 1.0 else ":")
    if timed:
        cloud.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _scatter(axes: Any, readings: Sequence[Reading], colour: str, label: str) -> None:
    plain, claimed = ([r for r in readings if r.faster is claims] for claims in (False, True))
    axes.scatter([r.other_load for r in plain], [r.speedup for r in plain], s=14, color=colour, label=label)
    axes.scatter([r.other_load for r in claimed], [r.speedup for r in claimed], s=70, color=colour, marker="*",
                 label=f"of those said to be faster: {len(claimed)}")  # fmt: skip


def _distribution(axes: Any, readings: Sequence[Reading], colour: str) -> None:
    speedups = sorted(r.speedup for r in readings if r.speedup is not None)
    axes.step(speedups, [(i + 1) / len(speedups) for i in range(len(speedups))], where="post", color=colour)
