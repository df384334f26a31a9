"""`pkb replay`: evaluate a stored verdict once more, with the secret it was judged with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pkb_env.cli import session


def replay(
    stored_id: Annotated[int, typer.Argument(metavar="ID", help="row of the verdict, as `pkb eval --store` printed it")],
    *,
    store: Annotated[Path, typer.Option("--store", help="the file it is kept in")],
    pack: Annotated[Path | None, typer.Option("--pack", help="folder that the problem comes from")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output, nothing else")] = False,
) -> None:
    """Run a stored candidate again on the same secret inputs; exit code 0 when the status is the same, else 1."""
    with session.guarded():
        from pkb_env.cli import report
        from pkb_env.evaluator import Evaluator

        session.in_pack(pack, "")
        kept = session.existing_store(store)
        with session.progress(f"replaying verdict {stored_id} ...", quiet=as_json), Evaluator(store=kept) as evaluator:
            old, new = evaluator.replay(stored_id)
        same = old.status is new.status
        if as_json:
            verdicts = {"stored": json.loads(old.to_json()), "replayed": json.loads(new.to_json())}
            typer.echo(json.dumps({"same_status": same, **verdicts}))
        else:
            console = session.page()
            for label, verdict in (("stored", old), ("replayed", new)):
                console.rule(label, align="left")
                report.show_verdict(console, verdict)
            console.print("same status" if same else "[bold red]another status[/]", highlight=False)
        code = session.exit_code(new)
        raise SystemExit(code if code == session.FAILED else session.CORRECT if same else session.NOT_CORRECT)
