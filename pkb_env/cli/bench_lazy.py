"""`pkb bench lazy`: how many problems lazy answers get past the judge, and past the public benchmark's check.

Not here: the trials and the table (`pkb_env.bench.lazy_run`, `pkb_env.bench.lazy`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pkb_env.cli import bench_setting, session

if TYPE_CHECKING:
    from pathlib import Path

    from pkb_env.bench.lazy import Row
    from pkb_env.bench.lazy_run import Plan


def lazy(
    *,
    problem: bench_setting.Problems = None,
    profile: Annotated[list[str] | None, typer.Option("--profile", help="repeatable; default: upstream, then hardened")] = None,
    world_size: Annotated[int, typer.Option("--world-size", "-w", min=2, help="number of ranks")] = 2,
    trials: Annotated[int, typer.Option("--trials", min=1, help="all of which an answer must pass")] = 5,
    size: bench_setting.Size = "default",
    out: bench_setting.Out = None,
    as_json: bench_setting.AsJson = False,
) -> None:
    """Give lazy answers to every problem to the judge: zeros, the first input, communication left out and others.

    Shapes that are too heavy for a CPU give way to smaller ones; the table says which.  Inputs have a fixed seed.
    With --out the folder gets lazy.md, the table, and lazy.json.
    """
    with session.guarded():
        import time
        from dataclasses import asdict

        from pkb_env.bench.lazy import counts, markdown
        from pkb_env.bench.lazy_run import ANSWERS, Plan, take
        from pkb_env.cli import bench_report
        from pkb_env.problem_set import fitting, problem_set

        profiles = tuple(dict.fromkeys(profile or ("upstream", "hardened")))
        for each in profiles:
            found = fitting(problem_set(problem or "all"), world_size=world_size, size=size, profile=each)
        plan, started = Plan(found, profiles, world_size, trials, size), time.monotonic()
        with bench_setting.told("lazy", len(found) * len(profiles), quiet=as_json) as heard:
            rows = take(plan, lambda row: heard(_line(row)))
        told = {
            "bench": "lazy", **bench_setting.machine(), "command": _command(plan, problem, profile, out), **_spent(rows, started),
            "world_size": world_size, "trials": trials, "dtype": "float32", "rows": [asdict(row) for row in rows],
            "counts": {
                kind: {f"{profile}, {check}": number for (profile, check), number in count.items()}
                for kind, count in counts(rows, ANSWERS).items()
            },
        }  # fmt: skip
        text = markdown(rows, ANSWERS, told)
        bench_report.publish(told, out, as_json, lambda _: typer.echo(text, nl=False))
        if out is not None:
            (out / "lazy.md").write_text(text, encoding="utf-8")


def _spent(rows: list[Row], started: float) -> dict[str, Any]:
    """Day, seconds, and the memory of the process that had most."""
    import time
    from datetime import UTC, datetime

    from pkb_env.unboxed import peak_memory

    peak = max([peak_memory(), *(row.rank_bytes for row in rows)])
    return {"date": datetime.now(UTC).date().isoformat(), "seconds": time.monotonic() - started, "peak_bytes": peak}


def _line(row: Row) -> str:
    passed = "; ".join(f"{check}: {', '.join(row.passing(check)) or 'none'}" for check in ("judge", "public check"))
    return f"{row.profile} {row.problem} ({row.size}), {row.seconds:.1f} s, {row.failed or passed}"


def _command(plan: Plan, problem: list[str] | None, profile: list[str] | None, out: Path | None) -> str:
    """What to type for the same again."""
    options = [f"--problem {name}" for name in problem or ()] + [f"--profile {name}" for name in profile or ()]
    options += [f"--world-size {plan.world_size}"] * (plan.world_size != 2) + [f"--trials {plan.trials}"] * (plan.trials != 5)
    options += [f"--size {plan.size}"] * (plan.size != "default") + ([f"--out {out}"] if out else [])
    return " ".join(["pkb bench lazy", *options])
