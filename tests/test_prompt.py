"""What a policy reads, kept as files in `snapshots/`; `PKB_UPDATE_SNAPSHOTS=1` writes them anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from verdicts import example, timed

import problems
from pkb_env import backends
from pkb_env.backends import names
from pkb_env.config import EvalConfig
from pkb_env.errors import UsageError
from pkb_env.prompt import MAX_SHOWN_CHARS, feedback, shown, task_prompt
from pkb_env.submission import Submission
from rewards.verdict import RankReport, Status, Verdict

SNAPSHOTS = Path(__file__).parent / "snapshots"
SOURCE = """\
import torch
from pkb_box import compile_cpp

lib = compile_cpp(\"\"\"
extern "C" void add(float* x) {
    x[0] += y;
}
\"\"\")


def solution(tensor):
    torch.distributed.all_reduce(tensor)
    return tensor / 0
"""
BROKEN = "ZeroDivisionError: tensor / 0"
WAITS = "is at line 12 in solution(), waits in collective #1 all_reduce"
CASES: dict[str, Verdict] = {
    "correct_faster": timed(
        1.62, time_ms=1.2346, speedup_low=1.5, speedup_high=1.7, baselines={"reference": 2.0, "compiled": 1.5},
        bound_ms=0.31, skew=0.4, notes=("cache-hot",),
    ),
    "correct_slower": timed(0.5, speedup_low=0.45, speedup_high=0.55, time_ms=1500.0, baselines={"reference": 750.0}),
    "correct_unproven": timed(
        1.01, speedup_low=0.97, speedup_high=1.06, time_ms=0.0421, baselines={"reference": 0.0425}, faster=False
    ),
    "correct_untimed": example(),
    "infra": example(Status.INFRA, message="zygote at /tmp/pkb-1 died", stage="harness"),
    "invalid": example(Status.INVALID, message="candidate.py, line 11: expected ':'", stage="submission"),
    "compile_error": example(
        Status.COMPILE_ERROR, stage="compile",
        message="the compiler refused a source (rank 0, line 4):\n/tmp/box/1/source.cpp: In function 'void add(float*)':\n"
        "/tmp/box/1/source.cpp:3:13: error: 'y' was not declared in this scope\n    3 |     x[0] += y;\n",
    ),
    "compile_deadline": example(Status.COMPILE_ERROR, stage="compile", message="the compiler ran past its deadline of 60 s"),
    "load_error": example(
        Status.LOAD_ERROR, stage="load",
        message="importing the module failed on rank 0, line 2: ImportError: no name 'compile_cpp'",
        ranks=(RankReport(0, "load", line=2, error="ImportError: no name 'compile_cpp'"), RankReport(1, "load")),
    ),
    "runtime_error": example(
        Status.RUNTIME_ERROR, stage="run", message=f"solution() raised on rank 1, line 13 in solution(): {BROKEN}",
        ranks=(
            RankReport(0, "call", line=12, error="RuntimeError: peer closed"),
            RankReport(1, "raised", line=13, error=BROKEN),
        ),
    ),
    "runtime_signal": example(
        Status.RUNTIME_ERROR, stage="run", message="rank 1 ended during the call with signal SIGSEGV",
        ranks=(RankReport(0, "returned"), RankReport(1, "call", exit="signal SIGSEGV", line=13)),
    ),
    "deadlock": example(
        Status.DEADLOCK, stage="run", message="deadlock: the call did not end within 10 s",
        ranks=(RankReport(0, "call", stuck=WAITS, line=12), RankReport(1, "returned")),
    ),
    "timeout": example(
        Status.TIMEOUT, stage="run", message="the call did not end within 10 s: rank 0 is at line 13 in solution()",
        ranks=(RankReport(0, "call", stuck="is at line 13 in solution()", line=13), RankReport(1, "call")),
    ),
    "out_of_memory": example(
        Status.OUT_OF_MEMORY, stage="run", message="rank 0, line 13: RuntimeError: can't allocate memory",
        ranks=(
            RankReport(0, "raised", line=13, error="RuntimeError: can't allocate memory", peak_memory_bytes=6 << 30),
            RankReport(1, "call"),
        ),
    ),
    "tampered": example(Status.TAMPERED, stage="run", message="rank 0 answered with a wrong nonce"),
    "wrong_result": example(
        Status.WRONG_RESULT, passed=0.5,
        message="3 of 6 comparisons fail; the first: trial 0, rank 1, output 0: element [3, 4] is 1.5, expected 2.25",
        ranks=(
            RankReport(0, "returned", max_error=1e-7),
            RankReport(1, "returned", output=0, index=(3, 4), got="1.5", expected="2.25", max_error=0.75),
        ),
    ),
    "wrong_kind": example(
        Status.WRONG_RESULT, world_size=6,
        message="6 of 6 comparisons fail; the first: trial 0, rank 0, output 0: is None, wanted a tensor",
        ranks=tuple(RankReport(rank, "returned", output=0, error="is None, wanted a tensor") for rank in range(6)),
    ),
}  # fmt: skip


def matches_snapshot(name: str, text: str) -> None:
    path = SNAPSHOTS / name
    if os.environ.get("PKB_UPDATE_SNAPSHOTS"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CASES)
def test_feedback_of_every_kind(name: str) -> None:
    matches_snapshot(f"feedback_{name}.md", feedback(CASES[name], SOURCE))


def test_every_status_has_a_snapshot() -> None:
    assert {verdict.status for verdict in CASES.values()} == set(Status)


@pytest.mark.parametrize("name", CASES)
def test_feedback_shows_no_machine_path_and_needs_no_source(name: str) -> None:
    assert "/tmp" not in feedback(CASES[name], SOURCE)  # noqa: S108
    assert feedback(CASES[name])


@pytest.mark.parametrize(("backend", "topology"), [*((b, "cpu") for b in names()), ("cuda", "node"), ("triton", "shared")])
def test_the_task_of_a_problem(backend: str, topology: str) -> None:
    problem = problems.load("gemm_allreduce")
    settings = Submission("", problem.slug, backend, world_size=4, topology=topology)
    limits = EvalConfig(rank_memory_bytes=4 << 30, load_deadline_s=20, call_deadline_s=10)
    text = task_prompt(problem, settings, limits, max_turns=1 if backend == "torch" else 3)
    matches_snapshot(f"task_{backend}.md", text)


@pytest.mark.parametrize("name", problems.names())
def test_every_problem_has_a_task_in_every_size(name: str) -> None:
    problem = problems.load(name)
    for size in problem.sizes.values():
        text = task_prompt(problem, Submission("", name, size=size.name))
        assert f"def solution({problem.arguments[0]}" in text
        assert all(f"{axis}={extent}" in text for axis, extent in size.dims.items())
        assert "noqa" not in text
        assert "make_inputs" not in text
        for changed in problem.mutates:
            assert changed in text


def test_the_task_tells_the_limits_of_the_evaluator() -> None:
    problem = problems.load("allreduce")
    text = task_prompt(problem, Submission("", problem.slug), EvalConfig(call_deadline_s=7.5, rank_memory_bytes=1 << 30))
    assert "7.5 s for one call, 1024 MiB of memory" in text


@pytest.mark.parametrize(("topology", "library"), [("node", "NCCL"), ("shared", "gloo")])
@pytest.mark.parametrize("backend", ["torch", "cuda", "triton"])
def test_the_task_on_gpus_tells_what_the_reference_runs_over(backend: str, topology: str, library: str) -> None:
    problem = problems.load("allreduce")
    text = task_prompt(problem, Submission("", problem.slug, backend, topology=topology))
    assert f"The reference communicates over {library}" in text
    assert "Floating-point arguments are bfloat16" in text
    assert "cpu" not in text.lower()


@pytest.mark.parametrize(("backend", "topology"), [("cpp", "node"), ("cpp", "shared"), ("cuda", "cpu"), ("triton", "cpu")])
def test_a_backend_that_does_not_fit_is_refused(backend: str, topology: str) -> None:
    problem = problems.load("allreduce")
    with pytest.raises(UsageError, match="does not run on topology"):
        task_prompt(problem, Submission("", problem.slug, backend, topology=topology))


def test_foreign_text_is_cut_and_cleaned() -> None:
    assert shown("\x1b[31mred\x1b[0m\x07 at /home/me/x.cpp:3, 1/2 http://a/b") == "red at x.cpp:3, 1/2 http://a/b"
    assert shown("\ud800 é") == "? é"
    long = shown("a" * 10_000)
    assert len(long) < MAX_SHOWN_CHARS + 50
    assert "8000 characters left out" in long


def test_examples_define_a_solution_for_another_operation() -> None:
    toys = {backends.load(name).toy for name in (*names(), *names("node"))}
    assert toys.isdisjoint(problems.load(name).title for name in problems.names())
