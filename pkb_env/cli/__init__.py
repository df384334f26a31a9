"""The command `pkb`: one file per command, joined here.  Heavy imports happen inside the commands, so that help is quick.

Not here: errors and exit codes (`session`), what a verdict looks like on a terminal (`report`).
"""

from __future__ import annotations

import typer

from pkb_env.cli import bench, doctor, evaluate, evaluate_policy, export, list_problems, replay, score, show

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Multi-rank kernels: list and show problems, evaluate a candidate or a policy, replay or rescore verdicts, inspect this "
    "machine.",
    epilog="Exit codes: 0 correct, 1 not correct, 2 the harness failed or was asked for something impossible, 130 interrupted.",
)
app.command("list")(list_problems.list_problems)
app.command("show")(show.show)
app.command("eval")(evaluate.evaluate)
app.command("evaluate")(evaluate_policy.evaluate_policy)
app.command("replay")(replay.replay)
app.command("score")(score.score)
app.command("export")(export.export)
app.command("doctor")(doctor.doctor)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Run the command line and exit."""
    app(prog_name="pkb")
