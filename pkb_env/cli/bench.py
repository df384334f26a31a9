"""`pkb bench`: how far measurements can be believed here, how quickly they come, what examples reach and lazy answers pass.

Not here: the measurements (`pkb_env.bench`), the tables (`bench_report`), the examples (`bench_examples`),
lazy answers (`bench_lazy`), the long run (`bench_soak`).
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pkb_env.cli import bench_examples, bench_lazy, bench_setting, bench_soak, session
from pkb_env.cli.bench_setting import AsJson, Out, Pairs, Size, Topology, WorldSize

if TYPE_CHECKING:
    from pkb_env.bench.null import Reading

app = typer.Typer(
    no_args_is_help=True, help="Null test, latency, throughput, examples, lazy answers and a long run on this machine."
)

app.command("examples")(bench_examples.examples)
app.command("lazy")(bench_lazy.lazy)
app.command("soak")(bench_soak.soak)


@app.command("null")
def null(
    *,
    problem: bench_setting.Problems = None,
    readings: Annotated[int, typer.Option("--readings", "-n", min=1, help="of each problem")] = 60,
    world_size: WorldSize = 2,
    topology: Topology = "cpu",
    size: Size = "default",
    pairs: Pairs = None,
    precision: session.Precision = None,
    time_budget: session.TimeBudget = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate references against themselves: the truth is 1.0x and never faster, all else is noise.

    With --out each reading is kept as it comes, a run that was cut short goes on where it stopped, and the folder gets
    null.json and, where matplotlib is installed, null.png.
    """
    with session.guarded():
        from pkb_env.bench.null import summarise
        from pkb_env.bench.null_run import Notebook, Plan, take
        from pkb_env.cli import bench_report
        from pkb_env.problem_set import fitting, problem_set

        found = fitting(problem_set(problem or "all"), world_size=world_size, size=size, profile="hardened")
        config = bench_setting.config(pairs=pairs, precision=precision, time_budget_s=time_budget)
        plan = Plan(tuple(p.slug for p in found), readings, world_size, size, config, topology)
        notebook = Notebook(out, plan.setting())
        with bench_setting.told("null test", len(found) * readings - len(notebook.readings), quiet=as_json) as heard:
            take(plan, notebook, lambda reading: heard(_reading_line(reading)))
        summaries = summarise(notebook.readings)
        told = {
            "bench": "null", **bench_setting.machine(topology), "setting": plan.setting(),
            "summaries": [asdict(summary) for summary in summaries],
            "readings": [asdict(reading) for reading in notebook.readings],
        }  # fmt: skip
        _draw(out, notebook.readings, plan.setting(), quiet=as_json)
        bench_report.publish(told, out, as_json, lambda page: bench_report.null(page, summaries, told))


def _reading_line(reading: Reading) -> str:
    speed = f"{reading.speedup:.3f}x" if reading.speedup is not None else f"{reading.status} {reading.message}"
    return f"{reading.problem} {speed}, load of others {reading.other_load:.2f}, {reading.seconds:.1f} s"


def _draw(out: Path | None, readings: list[Reading], setting: dict[str, Any], *, quiet: bool) -> None:
    """The picture is an extra: without matplotlib it is left out, and that is said."""
    if out is None:
        return
    from pkb_env.bench import picture
    from pkb_env.errors import UsageError

    title = f"{setting['hardware']}, W={setting['world_size']}, size {setting['size']}, {len(readings)} readings"
    try:
        picture.draw(out / "null.png", readings, title)
    except UsageError as error:
        if not quiet:
            typer.echo(str(error), err=True)


@app.command("latency")
def latency(
    *,
    problem: Annotated[str, typer.Option("--problem", "-p", help="slug, number or unique prefix")] = "allreduce",
    backend: Annotated[list[str] | None, typer.Option("--backend", "-b", help="repeatable; default: torch, cpp or cuda")] = None,
    world_size: WorldSize = 2,
    topology: Topology = "cpu",
    size: Size = "default",
    trials: Annotated[int, typer.Option("--trials", min=1, help="judged untimed calls, and pairs of launches")] = 5,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="warm and cached evaluations of each backend")] = 5,
    pairs: Pairs = None,
    precision: session.Precision = None,
    warm_up: Annotated[int, typer.Option("--warm-up", min=0, help="of a timed launch; the public number is 500")] = 500,
    calls: Annotated[int, typer.Option("--calls", min=0, help="its timed calls; public: 100; 0: no such launch")] = 100,
    with_load_inline: Annotated[bool, typer.Option("--with-load-inline", help="build a torch extension too: a minute")] = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """From source to verdict, cold, warm and cached, beside fresh launches that do the same the public way."""
    with session.guarded():
        from pkb_env.bench import texts
        from pkb_env.bench.latency import baseline, summarise
        from pkb_env.bench.latency_run import evaluations
        from pkb_env.bench.launches import PublicWay, load_inline_seconds
        from pkb_env.cli import bench_report
        from pkb_env.problem_set import fitting, named
        from pkb_env.submission import Submission

        (found,) = fitting([named(problem)], world_size=world_size, size=size, profile="hardened")
        sources = {name: texts.example(found.slug, name) for name in backend or ("torch", "cpp" if topology == "cpu" else "cuda")}
        config, ours = bench_setting.config(pairs=pairs, precision=precision, trials=trials), []
        with bench_setting.told("latency", 0, quiet=as_json) as heard:
            for name, source in sources.items():
                asked = Submission(source, found.slug, name, world_size, topology, size=size)
                ours += evaluations(source, asked, config, repeats, lambda e: heard(f"{e.backend} {e.kind}: {e.seconds:.2f} s"))
            way = PublicWay(found.slug, world_size, size, trials=trials, warm_up=warm_up, calls=calls, topology=topology)
            launches = way.run(lambda x: heard(f"launch, {x.kind}, {x.side}: {x.seconds:.2f} s"))
            built = load_inline_seconds() if with_load_inline else None
        public = baseline(launches, built)
        rows = summarise(ours, public)
        told = {
            "bench": "latency", **bench_setting.machine(topology), "problem": found.slug, "world_size": world_size, "size": size,
            "topology": topology, "config": config.model_dump(mode="json"), "public_way": asdict(way), "baseline": asdict(public),
            "rows": [asdict(row) for row in rows], "launches": [asdict(x) for x in launches],
            "evaluations": [asdict(each) for each in ours],
        }  # fmt: skip
        bench_report.publish(told, out, as_json, lambda page: bench_report.latency(page, rows, public, launches, told))


@app.command("throughput")
def throughput(
    *,
    problem: Annotated[str, typer.Option("--problem", "-p", help="slug, number or unique prefix")] = "allreduce",
    backend: Annotated[str, typer.Option("--backend", "-b", help="of correct ones: torch (reference), cpp (example)")] = "torch",
    slots: Annotated[str, typer.Option("--slots", help="numbers of evaluations at once, separated by commas")] = "1,2,4",
    candidates: Annotated[int, typer.Option("--candidates", "-n", min=1, help="in the mix, for each number of slots")] = 40,
    correct: Annotated[float, typer.Option("--correct", min=0, help="share of correct candidates")] = 0.5,
    wrong: Annotated[float, typer.Option("--wrong", min=0, help="share of wrong ones")] = 0.25,
    failing: Annotated[float, typer.Option("--failing", min=0, help="share of those that raise")] = 0.2,
    hanging: Annotated[float, typer.Option("--hanging", min=0, help="share of those that wait for ever")] = 0.05,
    world_size: WorldSize = 2,
    size: Size = "default",
    pairs: Pairs = None,
    precision: session.Precision = None,
    call_deadline: Annotated[float | None, typer.Option("--call-deadline", min=0.1, help="seconds of one call")] = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Verdicts per hour for a mix of candidates, no two equal, and what keeps there from being more."""
    with session.guarded():
        from pkb_env.bench.texts import counts
        from pkb_env.bench.throughput_run import Mix, measure
        from pkb_env.cli import bench_report
        from pkb_env.problem_set import fitting, named

        (found,) = fitting([named(problem)], world_size=world_size, size=size, profile="hardened")
        shares = {"correct": correct, "wrong": wrong, "failing": failing, "hanging": hanging}
        mix = Mix(found.slug, counts(shares, candidates), backend, world_size, size)
        config, runs = bench_setting.config(pairs=pairs, precision=precision, call_deadline_s=call_deadline), []
        with bench_setting.told("throughput", 0, quiet=as_json) as heard:
            for number in _numbers(slots):
                runs.append(measure(mix, config, number))
                heard(f"{number} slots: {runs[-1].per_hour:.0f} verdicts per hour")
        told = {
            "bench": "throughput", **bench_setting.machine(), "mix": asdict(mix), "config": config.model_dump(mode="json"),
            "runs": [asdict(run) for run in runs],
        }  # fmt: skip
        bench_report.publish(told, out, as_json, lambda page: bench_report.throughput(page, runs, told))


def _numbers(text: str) -> list[int]:
    from pkb_env.errors import UsageError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"--slots takes numbers >= 1 separated by commas, such as 1,2,4; came {text!r}")
    return [int(part) for part in parts]
