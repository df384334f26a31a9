"""`pkb score`: what other rewards would have made of stored rollouts."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pkb_env.cli import session

if TYPE_CHECKING:
    from pkb_env.scoring.episodes import Episode
    from pkb_env.scoring.rescore import Difference, Rescored


def score(
    store: Annotated[Path, typer.Argument(help="a file that `--store` made")],
    *,
    reward: Annotated[str, typer.Option("--reward", "-r", help="a preset, or a TOML file")] = "default",
    versus: Annotated[list[str] | None, typer.Option("--versus", help="compare with it; repeatable")] = None,
    run: Annotated[str | None, typer.Option("--run", help="rollouts of this run; default: all")] = None,
    gamma: Annotated[float, typer.Option("--gamma", min=0.0, max=1.0, help="discount from one turn to the one before")] = 0.4,
    returns: Annotated[str, typer.Option("--returns", help="of turns: sum or max")] = "sum",
    advantage: Annotated[str | None, typer.Option("--advantage", help="a name of rewards.ADVANTAGES; default: its own")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="picture of the first comparison")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output, nothing else")] = False,
) -> None:
    """Score stored rollouts again, without running a kernel: values, groups that teach nothing, what another reward changes.

    The turns of one sample are an episode; the same turn of a group's samples are compared with each other.  A store of
    verdicts without rollouts counts every verdict as a sample, and those of one problem as a group.
    """
    with session.guarded():
        from pkb_env.scoring.episodes import episodes
        from pkb_env.scoring.rescore import difference, places

        names = [reward, *(versus or [])]
        _check(returns, advantage, plot, names)
        found = episodes(session.existing_store(store), run)
        scored = [_rescore(found, name, gamma, returns, advantage) for name in names]
        groups = list(places(found).values())
        differences = [difference(scored[0], other, groups) for other in scored[1:]]
        if plot:
            from pkb_env.scoring.picture import draw

            statuses = [None if v is None else v.status for episode in found for v in episode.verdicts]
            draw(plot, scored[0], scored[1], statuses)
        if as_json:
            typer.echo(json.dumps(_as_json(found, scored, differences), allow_nan=False))
        else:
            _print(found, scored, differences)


def _check(returns: str, advantage: str | None, plot: Path | None, names: list[str]) -> None:
    from pkb_env.errors import UsageError
    from rewards import ADVANTAGES
    from rewards.returns import HOW

    if returns not in HOW:
        raise UsageError(f"--returns {returns!r}: wanted one of {', '.join(HOW)}")
    if advantage is not None and advantage not in ADVANTAGES:
        raise UsageError(f"--advantage {advantage!r}: wanted one of {', '.join(ADVANTAGES)}")
    if plot and len(names) < 2:
        raise UsageError("--plot draws two rewards against each other; name the second with --versus")
    if plot and plot.suffix not in (".png", ".pdf", ".svg"):
        raise UsageError(f"--plot {plot} ends in {plot.suffix!r}; wanted .png, .pdf or .svg")


def _rescore(found: list[Episode], name: str, gamma: float, returns: str, advantage: str | None) -> Rescored:
    from pkb_env.scoring.rescore import rescore

    return rescore(found, session.reward(name), gamma=gamma, how=returns, advantage=advantage)


def _as_json(found: list[Episode], scored: list[Rescored], differences: list[Difference]) -> dict[str, Any]:
    return {
        "episodes": len(found), "rewards": [_rescored(each) for each in scored],
        "differences": [{key: _number(value) for key, value in asdict(each).items()} for each in differences],
    }  # fmt: skip


def _rescored(of: Rescored) -> dict[str, Any]:
    told = {"mean": _number(of.mean), "deviation": _number(of.deviation), "unscored": of.values.count(None)}
    return asdict(of) | told


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _print(found: list[Episode], scored: list[Rescored], differences: list[Difference]) -> None:
    from rich.table import Table

    first = scored[0]
    console = session.page()
    turns, unscored = len(first.values), first.values.count(None)
    console.print(f"{len(found)} episodes, {turns} turns, {unscored} of them unscored", highlight=False)
    table = Table("reward", "advantage", "mean", "deviation", "groups", "flat", box=None, pad_edge=False)
    for each in scored:
        table.add_row(each.reward, each.advantage, f"{each.mean:.4f}", f"{each.deviation:.4f}", str(each.groups), str(each.flat))
    console.print(table)
    for other, found_between in zip(scored[1:], differences, strict=True):
        console.print(
            f"{first.reward} and {other.reward}: rank correlation {found_between.rank_correlation:.3f}, "
            f"{found_between.changed_signs} turns pushed the other way, another best in {found_between.other_best} groups",
            highlight=False,
        )
