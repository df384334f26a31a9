"""`pkb doctor`: what this machine has, which walls hold here, and how that was tried."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from pkb_env.cli import session

if TYPE_CHECKING:
    from rich.console import Console

    from pkb_env.doctor import Health, Try, Wall


def doctor(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output, nothing else")] = False,
) -> None:
    """Inspect this machine: versions, compilers, GPUs; then try every wall from inside real boxes, also on a GPU.

    Exit code 0 when evaluations work here, also with walls missing (they are named); 2 when they do not.
    """
    with session.guarded():
        from pkb_env.doctor import examine

        with session.progress("examining this machine ...", quiet=as_json):
            health = examine()
        if as_json:
            typer.echo(json.dumps(asdict(health) | {"works": health.works}))
        else:
            _print(health)
        raise SystemExit(session.CORRECT if health.works else session.FAILED)


def _print(health: Health) -> None:
    console = session.page()
    width = max(map(len, health.facts))
    for name, value in health.facts.items():
        console.print(f"{name:<{width}} {value}", highlight=False, markup=False)
    console.print()
    _print_walls(console, health.walls)
    console.print()
    for topology, tries in groupby(health.tries, key=lambda each: each.topology):
        _print_tries(console, topology, tries)
    console.print(health.trouble or "evaluations work here", style="bold red" if health.trouble else "bold green", markup=False)


def _print_walls(console: Console, walls: Iterable[Wall]) -> None:
    for wall in walls:
        console.print(f"[{'green' if not wall.why_not else 'red'}]{wall.name:<12}[/] {wall.stops}")
        if wall.why_not:
            console.print(f"             does not hold here: {wall.why_not}", highlight=False, markup=False)


def _print_tries(console: Console, topology: str, tries: Iterable[Try]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(f"tried from inside a box on {topology}", "by", "came of it", box=None, pad_edge=False, header_style="bold")
    for each in tries:
        word = "[green]refused[/]" if each.refused else "[red]POSSIBLE[/]"
        table.add_row(each.what, each.wall, f"{word}: {escape(each.answer)}")
    console.print(table)
    console.print()
