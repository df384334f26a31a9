"""`pkb eval`: one candidate, on this machine."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pkb_env.cli import session

if TYPE_CHECKING:
    from pkb_env.config import EvalConfig
    from pkb_env.submission import Submission
    from rewards.score import Reward
    from rewards.verdict import Verdict


def evaluate(
    problem: Annotated[str, typer.Argument(help="slug, number or unique prefix")],
    file: Annotated[str, typer.Argument(help="a file that defines `solution`; - reads standard input")],
    *,
    backend: Annotated[str, typer.Option("--backend", "-b", help="written in: torch, cpp (cpu), cuda, triton (GPUs)")] = "torch",
    world_size: Annotated[int, typer.Option("--world-size", "-w", min=1, help="number of ranks")] = 2,
    size: Annotated[str, typer.Option("--size", "-s", help="named size, see `pkb show`")] = "default",
    profile: Annotated[str, typer.Option("--profile", help="hardened, or upstream: the public benchmark's inputs")] = "hardened",
    topology: Annotated[str, typer.Option("--topology", help="cpu, node (a GPU each), shared (one) or auto")] = "cpu",
    reward: Annotated[str, typer.Option("--reward", "-r", help="a preset, or a TOML file")] = "default",
    pack: session.Pack = None,
    store: Annotated[Path | None, typer.Option("--store", help="look the verdict up in this file, and keep it there")] = None,
    pairs: Annotated[int | None, typer.Option("--pairs", min=0, help="most timed pairs, at least 5; 0: no time")] = None,
    trials: Annotated[int | None, typer.Option("--trials", min=1, help="judged untimed calls")] = None,
    precision: session.Precision = None,
    time_budget: session.TimeBudget = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="GPUs: tell which kernels ran; one more call")] = False,
    require_wall: Annotated[list[str] | None, typer.Option("--require-wall", help="refuse to run without it; repeatable")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output, nothing else")] = False,
) -> None:
    """Evaluate a candidate: verdict, ranks, times, speed-up with its interval, reward."""
    with session.guarded():
        from pkb_env.submission import Submission

        scorer, problem = session.reward(reward), session.in_pack(pack, problem)
        submission = Submission(_read(file), problem, backend, world_size, topology, profile, size)
        counts = {"pairs": pairs, "precision": precision, "trials": trials, "time_budget_s": time_budget, "kernels": kernels}
        config = _config(**counts, require_walls=tuple(require_wall or ()))
        with session.progress(f"evaluating {problem}: {backend}, {world_size} ranks, size {size} ...", quiet=as_json):
            verdict, stored_id = _run(submission, config, store)
        _print(verdict, scorer, stored_id, as_json=as_json)
        raise SystemExit(session.exit_code(verdict))


def _read(file: str) -> str:
    raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    return raw.decode("utf-8", "surrogateescape")


def _config(**wanted: Any) -> EvalConfig:
    from pkb_env.config import EvalConfig

    return EvalConfig(**{name: value for name, value in wanted.items() if value is not None})


def _run(submission: Submission, config: EvalConfig, path: Path | None) -> tuple[Verdict, int | None]:
    """The verdict and its row in the store.  Through `aevaluate`, whose cancellation is how Ctrl-C leaves no process behind."""
    from pkb_env.evaluator import Evaluator
    from pkb_env.store import Store

    store = Store(path) if path else None
    with Evaluator(config, store) as evaluator:
        verdict = asyncio.run(evaluator.aevaluate(submission))
        return verdict, store.row_of(verdict, submission.text) if store else None


def _print(verdict: Verdict, reward: Reward, stored_id: int | None, *, as_json: bool) -> None:
    from pkb_env.cli import report

    score = reward(verdict)
    if as_json:
        typer.echo(json.dumps(report.as_json(verdict, score, reward.name, stored_id)))
        return
    console = session.page()
    report.show_verdict(console, verdict)
    report.show_score(console, score, reward.name)
    if stored_id is not None:
        console.print(f"stored as {stored_id}", highlight=False)
