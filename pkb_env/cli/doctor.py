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

    from pkb_env.doctor import Health, Try


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
    _print_walls(console, health)
    console.print()
    for topology, tries in groupby(health.tries, key=lambda each: each.topology):
        _print_tries(console, topology, tries)
    console.print(health.trouble or "evaluations work here", style="bold red" if health.trouble else "bold green", markup=False)


def _print_walls(console: Console, health: Health) -> None:
    for wall in health.walls:
        attempts = [each.refused for each in health.tries if each.wall == wall.name]
        state = "[red]does not hold[/]" if wall.why_not else "[green]holds[/]"
        why = f" because {wall.why_not}" if wall.why_not else ""
        inside = f", and {sum(attempts)} of {len(attempts)} attempts from inside a box were refused" if attempts else ""
        get = f"; to get it: {wall.to_get_it}" if wall.to_get_it else ""
        console.print(f"{wall.name:<12}{state}", end="", highlight=False)
        line = f"{why}; tried: {wall.tried}{inside}{get}; it stops {wall.stops}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _print_tries(console: Console, topology: str, tries: Iterable[Try]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(f"tried from inside a box on {topology}", "by", "came of it", box=None, pad_edge=False, header_style="bold")
    for each in tries:
        word = "[green]refused[/]" if each.refused else "[red]POSSIBLE[/]"
        table.add_row(each.what, each.wall, f"{word}: {escape(each.answer)}")
    console.print(table)
    console.print()
