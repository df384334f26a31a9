"""`pkb export`: stored rollouts as rows for training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pkb_env.cli import session


def export(
    store: Annotated[Path, typer.Argument(help="a file that `--store` made")],
    out: Annotated[Path, typer.Argument(help=".jsonl, .parquet, or a new folder for datasets.load_from_disk")],
    *,
    reward: Annotated[str, typer.Option("--reward", "-r", help="a preset, or a TOML file")] = "default",
    run: Annotated[str | None, typer.Option("--run", help="rollouts of this run; default: all")] = None,
    only: Annotated[str, typer.Option("--only", help="all, scored, correct or faster (proven)")] = "all",
) -> None:
    """Write one row per completion: prompt, completion, problem, status, speed-up, value and advantage."""
    with session.guarded():
        from pkb_env.errors import UsageError
        from pkb_env.scoring import export as exporting
        from pkb_env.scoring.episodes import episodes
        from pkb_env.scoring.rescore import rescore

        if out.exists():
            raise UsageError(f"{out} is there already; name another, or remove it")
        found = episodes(session.existing_store(store), run)
        rows = exporting.keep(exporting.rows(found, rescore(found, session.reward(reward))), only)
        exporting.write(out, rows)
        typer.echo(f"{len(rows)} rows in {out}")
