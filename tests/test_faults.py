"""Ways in which a candidate goes wrong, through real boxes: right status, rank and line, in time, nothing left, next one fine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from leftovers import Leftovers

from pkb_env.config import EvalConfig
from pkb_env.evaluator import Evaluator
from pkb_env.submission import Submission
from rewards.verdict import Status, Verdict

DEADLINE_S = 2.0
HEAD = "import ctypes, os, signal, sys, time\nimport torch\nimport torch.distributed as dist\n"
GOOD = HEAD + "def solution(tensor):\n    out = tensor.clone()\n    dist.all_reduce(out)\n    return out\n"


def on_rank_1(line: str) -> str:
    """A candidate whose rank 1 does something else on line 6 before it joins the all-reduce."""
    return HEAD + (
        f"def solution(tensor):\n    if dist.get_rank() == 1:\n        {line}\n"
        "    out = tensor.clone()\n    dist.all_reduce(out)\n    return out\n"
    )


def body(*lines: str) -> str:
    return HEAD + "def solution(tensor):\n" + "".join(f"    {line}\n" for line in lines)


CASES: dict[str, tuple[str, Status, tuple[str, ...]]] = {
    "rank 1 returns early": (
        on_rank_1("return tensor.clone()"), Status.DEADLOCK, ("rank 1 returned", "rank 0 is at line 8", "all_reduce"),
    ),
    "rank 1 raises": (on_rank_1("raise ValueError('boom')"), Status.RUNTIME_ERROR, ("rank 1, line 6", "ValueError: boom")),
    "rank 1 exits": (on_rank_1("os._exit(3)"), Status.RUNTIME_ERROR, ("rank 1 ended", "exit 3")),
    "rank 1 calls sys.exit": (on_rank_1("sys.exit(0)"), Status.RUNTIME_ERROR, ("rank 1, line 6", "SystemExit")),
    "rank 1 segfaults": (on_rank_1("ctypes.string_at(0)"), Status.RUNTIME_ERROR, ("rank 1", "SIGSEGV")),
    "rank 1 holds the GIL": (on_rank_1("ctypes.PyDLL(None).sleep(1000)"), Status.DEADLOCK, ("rank 1 is at line 6",)),
    "rank 1 stops itself": (on_rank_1("os.kill(os.getpid(), signal.SIGSTOP)"), Status.DEADLOCK, ("rank 1", "stopped")),
    "another collective": (on_rank_1("dist.broadcast(tensor.clone(), 0)"), Status.DEADLOCK, ("rank 0 is at line 8",)),
    "endless loop": (body("while True: pass"), Status.TIMEOUT, ("line 5", "rank 0", "rank 1")),
    "ignores signals": (
        body("signal.signal(signal.SIGUSR1, signal.SIG_IGN)", "while True: time.sleep(1)"), Status.TIMEOUT, ("rank 0",),
    ),
    "aborts": (body("os.abort()"), Status.RUNTIME_ERROR, ("SIGABRT",)),
    "writes a huge file": (
        body("f = open('big', 'wb')", "while True: f.write(b'x' * (1 << 20))"), Status.RUNTIME_ERROR, ("line 6", "Errno 2"),
    ),
    "writes many files": (
        body("for i in range(99): open(str(i), 'wb').write(b'x' * (8 << 20))"), Status.RUNTIME_ERROR, ("line 5", "No space left"),
    ),
    "opens thousands of files": (
        body("keep = [open('/dev/null') for _ in range(9999)]"), Status.RUNTIME_ERROR, ("Too many open files",),
    ),
    "forks": (body("os.fork()"), Status.RUNTIME_ERROR, ("line 5", "Operation not permitted")),
    "hides memory in a file": (body("os.memfd_create('x')"), Status.RUNTIME_ERROR, ("line 5", "Operation not permitted")),
    "allocates without end": (body("keep = bytearray(64 << 30)"), Status.OUT_OF_MEMORY, ("line 5",)),
    "allocates tensors without end": (body("return torch.empty(1 << 40)"), Status.OUT_OF_MEMORY, ("line 5",)),
    "returns None": (body("return None"), Status.WRONG_RESULT, ("is None", "wanted a tensor")),
    "returns a tuple": (body("return tensor.clone(), tensor"), Status.WRONG_RESULT, ("is tuple",)),
    "returns its argument": (
        body("dist.all_reduce(tensor)", "return tensor"), Status.WRONG_RESULT, ("shares memory with argument 'tensor'",),
    ),
    "changes its argument": (
        body("dist.all_reduce(tensor)", "return tensor.clone()"), Status.WRONG_RESULT, ("must not be changed",),
    ),
    "returns NaN": (body("return torch.full_like(tensor, float('nan'))"), Status.WRONG_RESULT, ("is nan", "rank 0, output 0")),
    "returns another dtype": (
        body("dist.all_reduce(out := tensor.clone())", "return out.double()"), Status.WRONG_RESULT, ("float64",),
    ),
    "floods stdout": (
        body("print('x' * 10_000_000)", "dist.all_reduce(out := tensor.clone())", "return out"), Status.CORRECT, (),
    ),
    "speaks out of turn": (
        body(
            "import contextlib, socket",
            "for i in range(3, 40):",
            "    with contextlib.suppress(OSError): socket.socket(fileno=os.dup(i)).sendall(b'\\xff' * 99)",
            "time.sleep(99)",
        ),
        Status.TAMPERED, ("broke the protocol",),
    ),
    "loops at import": (HEAD + "while True: pass\n" + GOOD, Status.TIMEOUT, ("importing", "line 4")),
    "raises at import": (HEAD + "import no_such_module\n" + GOOD, Status.LOAD_ERROR, ("line 4", "no_such_module")),
    "does not compile": (
        "from pkb_box import compile_cpp\ncompile_cpp('int f( {')\n" + GOOD, Status.COMPILE_ERROR, ("candidate.cpp:1",),
    ),
    "is no Python": ("def solution(tensor:\n", Status.INVALID, ("line 1",)),
}  # fmt: skip


@pytest.fixture(scope="module")
def evaluator() -> Iterator[Evaluator]:
    config = EvalConfig(trials=1, pairs=0, call_deadline_s=DEADLINE_S, load_deadline_s=DEADLINE_S, rank_memory_bytes=3 << 30)
    with Evaluator(config) as made:
        yield made


def run(evaluator: Evaluator, source: str) -> Verdict:
    return evaluator.evaluate(Submission(source, "allreduce", size="tiny"))


@pytest.mark.parametrize("name", CASES)
def test_fault(evaluator: Evaluator, name: str) -> None:
    source, status, words = CASES[name]
    assert run(evaluator, GOOD).status is Status.CORRECT
    before = Leftovers.now(evaluator)
    start = time.monotonic()
    verdict = run(evaluator, source)
    seconds = time.monotonic() - start
    print(f"{name}: {verdict.status} after {seconds:.2f} s: {verdict.message}")
    assert verdict.status is status, verdict.message
    for word in words:
        assert word in verdict.message
    assert str(Path.cwd()) not in verdict.message
    assert seconds < 10 * (DEADLINE_S + 1)
    assert Leftovers.now(evaluator) == before
    assert run(evaluator, GOOD).status is Status.CORRECT


def test_deadlock_report_names_every_rank_with_four_ranks(evaluator: Evaluator) -> None:
    verdict = evaluator.evaluate(Submission(CASES["rank 1 returns early"][0], "allreduce", world_size=4, size="tiny"))
    assert verdict.status is Status.DEADLOCK
    assert [report.rank for report in verdict.ranks] == [0, 1, 2, 3]
    assert [bool(report.stuck) for report in verdict.ranks] == [True, False, True, True]
