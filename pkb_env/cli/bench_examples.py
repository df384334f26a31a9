"""`pkb bench examples`: the table of what the examples reach here.

Not here: the evaluations and the table (`pkb_env.bench.examples_run`, `pkb_env.bench.examples`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from pkb_env.cli import bench_setting, session

if TYPE_CHECKING:
    from pathlib import Path

    from pkb_env.bench.examples import Row
    from pkb_env.bench.examples_run import Plan


def examples(
    *,
    world_size: bench_setting.WorldSize = 2,
    topology: bench_setting.Topology = "cpu",
    size: bench_setting.Size = "default",
    pairs: bench_setting.Pairs = None,
    out: bench_setting.Out = None,
    as_json: bench_setting.AsJson = False,
) -> None:
    """Evaluate every example: speed-up, times and the machine's bound, as a table of Markdown.

    With --out the folder gets TOPOLOGY.md, the table, and examples.json.
    """
    with session.guarded():
        from dataclasses import asdict
        from datetime import UTC, datetime

        from pkb_env.bench.examples import markdown
        from pkb_env.bench.examples_run import Plan, evaluate
        from pkb_env.cli import bench_report

        plan = Plan(world_size, size, bench_setting.config(pairs=pairs), topology)
        submissions = plan.submissions()
        with bench_setting.told("examples", len(submissions), quiet=as_json) as heard:
            rows = evaluate(submissions, plan.config, lambda row: heard(_line(row)))
        told = {
            "bench": "examples", **bench_setting.machine(topology), "command": _command(plan, pairs, out),
            "date": datetime.now(UTC).date().isoformat(), "world_size": world_size, "topology": topology, "size": size,
            "config": plan.config.model_dump(mode="json"), "rows": [{**asdict(row), "share": row.share} for row in rows],
        }  # fmt: skip
        text = markdown(rows, told)
        bench_report.publish(told, out, as_json, lambda _: typer.echo(text, nl=False))
        if out is not None:
            (out / f"{topology}.md").write_text(text, encoding="utf-8")


def _line(row: Row) -> str:
    speed = f"{row.speedup:.2f}x" if row.speedup is not None else f"{row.status} {'; '.join(row.notes)}"
    return f"{row.backend}_{row.problem} {speed}, load of others {row.other_load:.2f}"


def _command(plan: Plan, pairs: int | None, out: Path | None) -> str:
    """What to type for the same again."""
    options = {
        "--world-size": (plan.world_size, 2), "--topology": (plan.topology, "cpu"), "--size": (plan.size, "default"),
        "--pairs": (pairs, None), "--out": (out, None),
    }  # fmt: skip
    return " ".join(["pkb bench examples", *(f"{name} {value}" for name, (value, usual) in options.items() if value != usual)])
