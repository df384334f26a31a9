"""`pkb list`: the problems.

Not here: which problems a name stands for (`pkb_env.problem_set`), the page of Markdown (`pkb_env.catalogue`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from pkb_env.cli import session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from problems.base import Problem

_FIELDS = ("number", "slug", "version", "title", "family", "parallelism", "collectives", "origin", "split")


def list_problems(
    of: Annotated[
        str, typer.Argument(help="`all`, a split (train, validation, test), a rung (rung-1 to rung-5), train/rung-1, or a name")
    ] = "all",
    *,
    pack: session.Pack = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON array on standard output")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="a page with prompt lengths, sizes and least costs")] = False,
) -> None:
    """List the problems with family, parallelism, collectives, split and rung of the ladder (1 is to begin with)."""
    with session.guarded():
        from pkb_env.errors import UsageError
        from pkb_env.problem_set import broken, problem_set

        if as_json and as_markdown:
            raise UsageError("--json and --markdown exclude each other")
        if as_markdown and pack:
            raise UsageError("--markdown is for the problems of this repository, whose costs and rungs are known")
        found = problem_set(session.in_pack(pack, of))
        for line in broken(pack):
            typer.echo(f"pkb: {line}", err=True)
        if as_markdown:
            from pkb_env.catalogue import page

            typer.echo(page(found), nl=False)
        elif as_json:
            told = [{**{name: getattr(problem, name) for name in _FIELDS}, "rung": _rung(problem)} for problem in found]
            typer.echo(json.dumps(told))
        else:
            session.page().print(_table(found))


def _table(found: Sequence[Problem]) -> Table:
    from rich.table import Column, Table

    names = Column("problem", min_width=max(len(p.slug) for p in found))  # a name that is cut short is no name
    table = Table("#", names, "family", "parallelism", "collectives", "split", "rung", box=None, pad_edge=False)
    for p in found:
        table.add_row(str(p.number), p.slug, p.family, p.parallelism, ", ".join(p.collectives), p.split, str(_rung(p)))
    return table


def _rung(problem: Problem) -> int | str:
    """Of a pack's problem it is unknown: its points are counted on what only its code could tell."""
    from problems.base import UNKNOWN
    from problems.rungs import rung

    return UNKNOWN if problem.pack else rung(problem)
