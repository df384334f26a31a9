"""`pkb list`: the problems."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from pkb_env.cli import session


def list_problems(
    of: Annotated[str, typer.Argument(help="`all`, a split (train, validation, test) or a name")] = "all",
    *,
    pack: session.Pack = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON array on standard output")] = False,
) -> None:
    """List the problems with family, parallelism, collectives and split."""
    with session.guarded():
        from rich.table import Table

        from pkb_env.problem_set import broken, problem_set

        found = problem_set(session.in_pack(pack, of))
        for line in broken(pack):
            typer.echo(f"pkb: {line}", err=True)
        if as_json:
            fields = ("number", "slug", "version", "title", "family", "parallelism", "collectives", "origin", "split")
            typer.echo(json.dumps([{name: getattr(problem, name) for name in fields} for problem in found]))
            return
        table = Table("#", "problem", "family", "parallelism", "collectives", "split", box=None, pad_edge=False)
        for p in found:
            table.add_row(str(p.number), p.slug, p.family, p.parallelism, ", ".join(p.collectives), p.split)
        session.page().print(table)
