"""Cold, warm and cached evaluations of one source, and one by a fresh command.

Not here: the public way (`launches`), medians and ratios (`latency`).
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from pkb_env.bench import texts
from pkb_env.bench.latency import Evaluation
from pkb_env.config import EvalConfig
from pkb_env.errors import HarnessError
from pkb_env.evaluator import Evaluator
from pkb_env.load import Meter
from pkb_env.submission import Submission
from rewards.verdict import Verdict


def evaluations(
    source: str, asked: Submission, config: EvalConfig, repeats: int, heard: Callable[[Evaluation], None] = lambda _: None
) -> list[Evaluation]:
    """One cold evaluation, `repeats` warm and as many cached ones, one command; `asked` says where, `source` what.

    Raises:
        HarnessError: the source is not correct, so that its latency says nothing.
    """
    found: list[Evaluation] = []

    def keep(evaluation: Evaluation) -> None:
        found.append(evaluation)
        heard(evaluation)

    with _empty_cache():
        with Evaluator(config) as evaluator:
            for kind, text in _texts(source, repeats):
                keep(_timed(kind, replace(asked, text=text), lambda s: evaluator.evaluate_many([s])[0]))
        keep(_timed("command", replace(asked, text=source), lambda s: _command(s, config)))
    return found


def _texts(source: str, repeats: int) -> Iterator[tuple[str, str]]:
    yield "cold", source
    for _ in range(repeats):
        yield "warm", texts.unique(source, f"copy {secrets.token_hex(8)}")
    for _ in range(repeats):
        yield "cached", source


def _timed(kind: str, submission: Submission, evaluate: Callable[[Submission], Verdict]) -> Evaluation:
    start = time.monotonic()
    with Meter() as meter:
        verdict = evaluate(submission)
    seconds = time.monotonic() - start
    if not verdict.correct:
        came = f"{verdict.status}: {verdict.message}"
        raise HarnessError(f"the {submission.backend} source for {submission.problem} came out {came}")
    peak = max((rank.peak_memory_bytes or 0 for rank in verdict.ranks), default=0)
    return Evaluation(submission.backend, kind, seconds, dict(verdict.stage_s), meter.load.other, peak)


def _command(submission: Submission, config: EvalConfig) -> Verdict:
    """A fresh `pkb eval`."""
    s = submission
    where = ["--backend", s.backend, "--world-size", str(s.world_size), "--size", s.size, "--topology", s.topology]
    counts = ["--trials", str(config.trials), "--pairs", str(config.pairs), "--time-budget", str(config.time_budget_s)]
    counts += ["--precision", str(config.precision)]
    command = [sys.executable, "-m", "pkb_env.cli", "eval", s.problem, "-", "--json", *where, *counts]
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(command, input=s.text, env=settings, capture_output=True, text=True, errors="replace", check=False)
    try:
        return Verdict.from_json(json.dumps(json.loads(done.stdout)["verdict"]))
    except (ValueError, KeyError):
        raise HarnessError(f"`pkb eval` gave no verdict: {done.stderr.strip()[-300:]}") from None


@contextmanager
def _empty_cache() -> Iterator[None]:
    before = os.environ.get("PKB_CACHE")
    with tempfile.TemporaryDirectory(prefix="pkb-latency-") as folder:
        os.environ["PKB_CACHE"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["PKB_CACHE"]
            else:
                os.environ["PKB_CACHE"] = before
