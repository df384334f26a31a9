"""Ranks that disagree, and candidates that take without end: status, rank and line, in time, nothing left, next one fine.

Not here: crashes, hangs and wrong outputs of one rank (`test_faults`), attacks (`test_exploits`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from leftovers import Leftovers

from pkb_env.config import EvalConfig
from pkb_env.evaluator import Evaluator
from pkb_env.submission import Submission
from rewards.verdict import Status

DEADLINE_S = 2.0
HEAD = "import os, sys, threading, time\nimport torch\nimport torch.distributed as dist\n"
GOOD = HEAD + "def solution(tensor):\n    out = tensor.clone()\n    dist.all_reduce(out)\n    return out\n"


class Case(NamedTuple):
    """A candidate, what may come of it, words of the message."""

    source: str
    statuses: set[Status]
    words: tuple[str, ...] = ()


def differing(rank_0: str, rank_1: str) -> str:
    """A candidate whose ranks do these things on lines 6 and 8 before they join the all-reduce."""
    return HEAD + (
        f"def solution(tensor):\n    if dist.get_rank() == 0:\n        {rank_0}\n    else:\n        {rank_1}\n"
        "    out = tensor.clone()\n    dist.all_reduce(out)\n    return out\n"
    )


def body(*lines: str) -> str:
    return HEAD + "def solution(tensor):\n" + "".join(f"    {line}\n" for line in lines)


def native(source: str, call: str = "") -> str:
    build = f"import pkb_box\nimport torch\nSOURCE = r'''{source}'''\nlibrary = pkb_box.compile_cpp(SOURCE)\n"
    return f"{build}def solution(tensor):\n    {call or 'library.f()'}\n    return tensor.clone()\n"


STUCK, BROKEN = {Status.DEADLOCK, Status.RUNTIME_ERROR}, {Status.RUNTIME_ERROR}
GATHER, SUM = "dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2))", "dist.all_reduce(torch.ones(2))"
CASES = {
    "another collective": Case(differing(GATHER, SUM), STUCK, ("line",)),
    "another order": Case(differing(f"{GATHER}; {SUM}", f"{SUM}; {GATHER}"), STUCK, ("line",)),
    "another size": Case(differing(SUM, "dist.all_reduce(torch.ones(4000))"), STUCK | {Status.WRONG_RESULT}),
    "a group on one rank only": Case(
        differing("pass", "dist.new_group([0, 1])"), {Status.DEADLOCK}, ("rank 1 is at line 8", "rank 0 is at line 10"),
    ),
    "another group": Case(
        differing("g = dist.new_group([0, 1]); dist.all_reduce(torch.ones(2), group=g)", "g = dist.new_group([0, 1])"),
        {Status.DEADLOCK}, ("rank 0 is at line 6", "rank 1 is at line 10"),
    ),
    "a receive that nobody sends": Case(
        differing("dist.recv(torch.empty(2), 1)", "pass"), {Status.DEADLOCK}, ("rank 0 is at line 6", "recv"),
    ),
    "recursion": Case(body("def again(): return again()", "again()"), BROKEN, ("line 5", "RecursionError")),
    "native recursion": Case(
        native('extern "C" int f(volatile char *up) { volatile char a[4096]; a[0] = up ? *up : 1; return f(a) + a[1]; }',
               "library.f(None)"), BROKEN, ("SIGSEGV",),
    ),
    "threads without end": Case(
        body("for _ in range(100_000):", "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"),
        {Status.RUNTIME_ERROR, Status.OUT_OF_MEMORY, Status.TIMEOUT}, ("line 6",),
    ),
    "shared memory of the machine": Case(body("open('/dev/shm/x', 'wb').write(bytes(1 << 20))"), BROKEN, ("line 5",)),
    "a view of its argument": Case(
        body("return tensor.flatten()[: tensor.numel()].view(tensor.shape)"), {Status.WRONG_RESULT}, ("memory",),
    ),
    "a transposed output": Case(
        body("out = tensor.t().contiguous()", "dist.all_reduce(out)", "return out.t()"), {Status.CORRECT},
    ),
    "a compile that never ends": Case(
        native("template <int N, int K> struct S { enum { v = S<N - 1, 2 * K>::v + S<N - 1, 2 * K + 1>::v }; };\n"
               "template <int K> struct S<0, K> { enum { v = 1 }; };\n"
               'extern "C" int f() { return S<30, 0>::v; }'), {Status.COMPILE_ERROR},
    ),
    "a compile that grows": Case(
        native('char data[1l << 33] = {1};\nextern "C" int f() { return data[5]; }'), {Status.COMPILE_ERROR},
    ),
    "a source that includes itself": Case(
        native('#include __FILE__\nextern "C" int f() { return 0; }'), {Status.INVALID}, ("include",),
    ),
    "text that is no text": Case(GOOD + "# \udcff\udc80\n", {Status.INVALID}, ("line 8", "surrogate")),
    "a megabyte of text": Case(GOOD + "# " + "x" * (1 << 20) + "\n", {Status.INVALID}, ("bytes",)),
}  # fmt: skip


@pytest.fixture(scope="module")
def evaluator() -> Iterator[Evaluator]:
    deadlines = {"call_deadline_s": DEADLINE_S, "load_deadline_s": DEADLINE_S, "compile_deadline_s": 2 * DEADLINE_S}
    config = EvalConfig(trials=1, pairs=0, rank_memory_bytes=3 << 30, **deadlines)
    with Evaluator(config) as made:
        yield made


@pytest.mark.parametrize("name", CASES)
def test_it_ends_with_its_status_and_the_next_one_is_right(evaluator: Evaluator, name: str) -> None:
    case = CASES[name]
    assert evaluator.evaluate(Submission(GOOD, "allreduce", size="tiny")).correct
    before, start = Leftovers.now(evaluator), time.monotonic()
    verdict = evaluator.evaluate(Submission(case.source, "allreduce", "cpp", size="tiny"))
    seconds = time.monotonic() - start
    print(f"{name}: {verdict.status} after {seconds:.2f} s: {verdict.message[:300]}")
    assert verdict.status in case.statuses, verdict.message
    assert all(word in verdict.message for word in case.words), verdict.message
    assert seconds < 10 * (DEADLINE_S + 1)
    assert Leftovers.now(evaluator) == before
    assert evaluator.evaluate(Submission(GOOD, "allreduce", size="tiny")).correct
