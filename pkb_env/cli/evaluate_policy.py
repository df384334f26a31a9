"""`pkb evaluate`: what a policy reaches on a set of problems.

Not here: the run (`pkb_env.policy_run`), the numbers (`pkb_env.metrics`), the table (`policy_table`).
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pkb_env.cli import bench_setting, session

if TYPE_CHECKING:
    from pkb_env.config import EvalConfig
    from pkb_env.policies import Sampling
    from pkb_env.submission import Submission
    from problems.base import Problem

_STORE = "store:"


@dataclass(frozen=True)
class _Course:
    """What was typed about the policy and what it is asked."""

    policy: str
    sampling: Sampling
    problems: list[str] | None
    samples: int
    turns: int
    k: list[int] | None
    out: Path | None
    quiet: bool

    def checked(self) -> Path:
        """The folder for what comes, if all of this goes together."""
        from pkb_env.errors import UsageError

        if self.out is None:
            raise UsageError("an evaluation wants --out FOLDER, in which answers and verdicts are kept as they come")
        if not self.sampling.temperature and self.samples > 1 and not self.policy.startswith("folder:"):
            raise UsageError(f"--temperature 0 draws {self.samples} equal answers; give -n 1, or a temperature above 0")
        return self.out


def evaluate_policy(
    policy: Annotated[str, typer.Argument(help="hf:FOLDER, openai:MODEL, folder:FOLDER; store:PATH runs nothing")],
    *,
    problems: Annotated[list[str] | None, typer.Option("--problems", "-p", help="name or split; repeatable; default all")] = None,
    samples: Annotated[int | None, typer.Option("--samples", "-n", min=1, help="of a problem; default: 1, store: all")] = None,
    k: Annotated[list[int] | None, typer.Option("--k", "-k", min=1, help="repeatable; default: 1 and as many as samples")] = None,
    turns: Annotated[int, typer.Option("--turns", min=1, help="answers of one sample, each after feedback")] = 1,
    out: Annotated[Path | None, typer.Option("--out", help="folder for all that comes; the same command goes on in it")] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="0: the likeliest token always")] = 1.0,
    top_p: Annotated[float, typer.Option("--top-p", min=1e-6, max=1, help="share of probability that is drawn from")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="of one answer")] = 4096,
    seed: Annotated[int | None, typer.Option("--seed", help="of the draws; an endpoint is told none without it")] = None,
    at_once: Annotated[int, typer.Option("--at-once", min=1, help="sequences of a batch, or open requests")] = 8,
    base_url: Annotated[str, typer.Option("--base-url", help="of the endpoint, as http://localhost:8000/v1")] = "",
    key_variable: Annotated[str, typer.Option("--key-variable", help="environment variable with its key")] = "OPENAI_API_KEY",
    backend: Annotated[str, typer.Option("--backend", "-b", help="written in: torch, cpp (cpu), cuda, triton (GPUs)")] = "torch",
    world_size: bench_setting.WorldSize = 2,
    size: bench_setting.Size = "default",
    profile: Annotated[str, typer.Option("--profile", help="hardened, or upstream: the public benchmark's inputs")] = "hardened",
    topology: Annotated[str, typer.Option("--topology", help="cpu, node (a GPU each), shared (one) or auto")] = "cpu",
    pairs: bench_setting.Pairs = None,
    precision: session.Precision = None,
    time_budget: session.TimeBudget = None,
    as_json: bench_setting.AsJson = False,
) -> None:
    """Draw candidates from a policy, evaluate them, and report pass@k, correct@k and fast_p@k by family and split.

    The folder of --out gets store.db (answers and verdicts), report.json and, where matplotlib is installed, fast_p.png.
    A run that was cut short, by whatever, goes on when the same command is given again.  Exit code 0, or 2 when no sample
    was counted.
    """
    with session.guarded():
        from pkb_env.policies import Sampling
        from pkb_env.submission import Submission

        where = Submission("", "", backend, world_size, topology, profile, size)
        if policy.startswith(_STORE):
            told = _recorded(Path(policy.removeprefix(_STORE)), where, problems, samples, k)
        else:
            sampling = Sampling(temperature, top_p, max_new_tokens, seed, at_once, base_url, key_variable)
            config = bench_setting.config(pairs=pairs, precision=precision, time_budget_s=time_budget)
            course = _Course(policy, sampling, problems, samples or 1, turns, k, out, as_json)
            told = _evaluated(course, where, config)
        _publish(told, out, as_json=as_json)
        if not told["groups"]["all"]["all"]["samples"]:
            raise SystemExit(session.FAILED)


def _recorded(
    path: Path, where: Submission, wanted: list[str] | None, samples: int | None, k: list[int] | None
) -> dict[str, Any]:
    """The report of what a store holds."""
    from pkb_env.policy_record import Recording
    from pkb_env.policy_report import report
    from pkb_env.problem_set import problem_set

    recording = Recording(path, where)
    setting = recording.setting
    asked = problem_set(wanted or setting["problems"])
    found = _fit(asked, setting)
    outcomes = recording.outcomes(found, samples)
    setting["samples"] = samples or setting.get("samples") or 1 + max(outcome.sample.sample for outcome in outcomes)
    return report(setting, found, outcomes, _ks(k, setting["samples"]), unfit=_unfit(asked, found), command=_command())


def _evaluated(course: _Course, where: Submission, config: EvalConfig) -> dict[str, Any]:
    """The report of a policy, once it has answered and all was evaluated."""
    from pkb_env import backends
    from pkb_env.policies import open_policy
    from pkb_env.policy_record import outcomes
    from pkb_env.policy_report import report
    from pkb_env.policy_run import Plan, occupied, run
    from pkb_env.problem_set import problem_set
    from pkb_env.topology import settled

    asked, ks = problem_set(course.problems or "all"), _ks(course.k, course.samples)
    found = _fit(asked, asdict(where))
    where = settled(where)
    backends.load(where.backend, where.topology)
    out, plan = course.checked(), Plan(found, course.samples, course.turns, where, config)
    with _remarks():
        policy = open_policy(course.policy, course.sampling, where.backend)
    setting = plan.setting(policy)
    with occupied(out, setting) as store, bench_setting.told("evaluate", 0, quiet=course.quiet) as heard:
        run(plan, policy, store, heard)
        return report(setting, found, outcomes(store, found), ks, unfit=_unfit(asked, found), command=_command())


def _fit(asked: Sequence[Problem], setting: dict[str, Any]) -> tuple[Problem, ...]:
    from pkb_env.problem_set import fitting

    return fitting(asked, world_size=setting["world_size"], size=setting["size"], profile=setting["profile"])


def _unfit(asked: Sequence[Problem], found: Sequence[Problem]) -> list[str]:
    there = {problem.slug for problem in found}
    return [problem.slug for problem in asked if problem.slug not in there]


def _command() -> str:
    return shlex.join(["pkb", *sys.argv[1:]])


def _ks(wanted: list[int] | None, samples: int) -> list[int]:
    from pkb_env.errors import UsageError

    ks = sorted(set(wanted or (1, samples)))
    if ks[-1] > samples:
        raise UsageError(f"-k {ks[-1]} of {samples} samples cannot be told; give -n {ks[-1]} or more")
    return ks


@contextmanager
def _remarks() -> Iterator[None]:
    """Warnings as lines on standard error."""
    import warnings

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    for warning in seen:
        typer.echo(f"pkb: {warning.message}", err=True)


def _publish(told: dict[str, Any], out: Path | None, *, as_json: bool) -> None:
    """Keep report and picture in the folder, if there is one, and print."""
    text = json.dumps(told, allow_nan=False)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        fresh = out / "report.new"
        fresh.write_text(text + "\n", encoding="utf-8")
        os.replace(fresh, out / "report.json")
        _draw(out, told)
    if as_json:
        typer.echo(text)
        return
    from pkb_env.cli import policy_table

    policy_table.show(session.page(), told)


def _draw(out: Path, told: dict[str, Any]) -> None:
    """The picture is an extra: without matplotlib it is left out, and that is said."""
    from pkb_env.cli.policy_table import headline
    from pkb_env.errors import UsageError
    from pkb_env.policy_curve import draw

    try:
        draw(out / "fast_p.png", told, headline(told))
    except UsageError as error:
        typer.echo(str(error), err=True)
