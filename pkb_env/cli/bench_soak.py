"""`pkb bench soak`: planted candidates by the hundred, and what they leave behind.

Not here: the run and its figures (`pkb_env.bench.soak_run`, `pkb_env.bench.soak`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pkb_env.cli import bench_setting, session

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from pkb_env.bench.soak import Ended, Report


def soak(
    *,
    candidates: Annotated[int, typer.Option("--candidates", "--n", "-n", min=1, help="in the mix")] = 1000,
    seed: Annotated[int | None, typer.Option("--seed", help="of the mix; default: another one each time")] = None,
    only: Annotated[list[int] | None, typer.Option("--only", min=1, help="repeatable: these of the mix, again")] = None,
    problem: bench_setting.Problems = None,
    slots: Annotated[int, typer.Option("--slots", min=0, help="evaluations at once; 0: half the cores, at least 2")] = 0,
    world_size: Annotated[int, typer.Option("--world-size", "-w", min=2, help="number of ranks")] = 2,
    size: bench_setting.Size = "tiny",
    pairs: Annotated[int, typer.Option("--pairs", min=0, help="most timed pairs of a group")] = 16,
    call_deadline: Annotated[float, typer.Option("--call-deadline", min=0.1, help="seconds of a call; import: twice")] = 1.5,
    out: bench_setting.Out = None,
    as_json: bench_setting.AsJson = False,
) -> None:
    """Honest, wrong, faulty and hostile candidates, no two equal, each with the verdict it must get; what they leave behind.

    Deadlines are short (--call-deadline), because many of them hang, and timing takes 0.3 s at most: a machine that is
    busy with others may need longer ones.  With --out the folder gets soak.json and the texts of candidates whose
    verdict is not what was planted; --seed S --only N runs number N of a mix again.  Exit code 1 when anything is amiss.
    """
    with session.guarded():
        from dataclasses import asdict
        from secrets import randbelow

        from pkb_env import hardware
        from pkb_env.bench.soak_mix import Mix
        from pkb_env.bench.soak_run import Soak
        from pkb_env.cli import bench_report
        from pkb_env.problem_set import fitting, problem_set

        found = fitting(problem_set(problem or "all"), world_size=world_size, size=size, profile="hardened")
        seed = randbelow(1 << 31) if seed is None else seed
        mix = Mix(seed, tuple(p.slug for p in found), world_size, size, timed=pairs > 0)
        config = bench_setting.config(
            trials=2, pairs=pairs, time_budget_s=0.3, call_deadline_s=call_deadline, load_deadline_s=2 * call_deadline,
            rank_memory_bytes=1 << 30, slots=slots or max(2, hardware.cores() // 2),
        )  # fmt: skip
        with bench_setting.told(f"soak --seed {seed}, not as planted", 0, quiet=as_json) as heard:
            run = Soak(mix, tuple(sorted(set(only or range(1, candidates + 1)))), config, lambda ended: heard(_line(ended)))
            report = run.run()
        _keep(out, run.odd)
        told = {
            "bench": "soak", **bench_setting.machine(), "mix": asdict(mix), "config": config.model_dump(mode="json"),
            "clean": report.clean, "report": asdict(report),
        }  # fmt: skip
        bench_report.publish(told, out, as_json, lambda page: _show(page, report, seed))
    if not report.clean:
        raise typer.Exit(session.NOT_CORRECT)


def _keep(out: Path | None, odd: dict[int, str]) -> None:
    if out is not None and odd:
        (out / "odd").mkdir(parents=True, exist_ok=True)
        for number, text in odd.items():
            (out / "odd" / f"{number}.py").write_text(text, encoding="utf-8")


def _line(ended: Ended) -> str:
    planted = " or ".join(ended.expected)
    return f"--only {ended.number} ({ended.kind}, {ended.problem}): {ended.status}, planted {planted}: {ended.message}"


def _show(console: Console, report: Report, seed: int) -> None:
    """Figures by line; what is not as it should be with its particulars."""
    for name, value in _lines(report, seed):
        console.print(f"{name:<24} {value}", highlight=False, markup=False, soft_wrap=True)
    for each in (*report.wrong, *report.infra):
        console.print(_line(each), highlight=False, markup=False, soft_wrap=True)


def _lines(report: Report, seed: int) -> list[tuple[str, str]]:
    return [
        ("seed", str(seed)),
        ("verdicts", f"{report.candidates} in {report.seconds:.0f} s, {report.per_minute:.1f} a minute"),
        ("statuses", ", ".join(f"{count} {status}" for status, count in report.statuses.items())),
        ("wrong verdicts", str(len(report.wrong))),
        ("INFRA", str(len(report.infra))),
        ("orphans", _listed(report.orphans)),
        ("surplus between batches", _listed(report.surplus)),
        ("restarts of the zygote", str(report.restarts)),
        ("leaked files", _listed(report.files)),
        ("leaked descriptors", f"{report.descriptors:+d}"),
        ("leaked threads", f"{report.threads:+d}"),
        ("open ports", _listed(tuple(map(str, report.ports)))),
        *((f"{name}, first to last", f"{each.first:.1f} -> {each.last:.1f}") for name, each in report.trends.items()),
        ("time, last / first tenth", f"{report.drift:.2f} (median over {len(report.drifts)} kinds)"),
    ]


def _listed(names: tuple[str, ...]) -> str:
    return f"{len(names)}: {', '.join(names)}" if names else "0"
