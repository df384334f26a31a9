"""Calls with no pause between them and one rank always last, in real boxes: who forgets to wait is wrong, who waits is right.

Not here: single calls that are wrong (`test_judge`, `test_faults`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from leftovers import Leftovers

import problems
from pkb_env import row
from pkb_env.attempt import Attempt, Job, Result
from pkb_env.boxes import Task
from pkb_env.cancellation import Cancellation
from pkb_env.config import EvalConfig
from pkb_env.evaluator import Evaluator
from pkb_env.submission import Candidate
from rewards.verdict import Status

CONFIG = EvalConfig(trials=2, pairs=0, call_deadline_s=3.0)
HEAD = """
import ctypes
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from pkb_box import compile_cpp

kept = {}


def memory(tensor, parts=1):
    if not kept:
        buffer = symm_mem.empty(parts * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        kept.update(buffer=buffer, handle=symm_mem.rendezvous(buffer, dist.group.WORLD), calls=0)
    kept["calls"] += 1
    return kept["buffer"], kept["handle"]

"""
PULL = """
def solution(tensor):
    buffer, handle = memory(tensor)
    buffer.copy_(tensor.view(-1))
    handle.barrier()
    out = sum(handle.get_buffer(rank, tensor.shape, tensor.dtype) for rank in range(handle.world_size))
    LAST
    return out
"""
PUSH = """
def solution(tensor):
    W = dist.get_world_size()
    buffer, handle = memory(tensor, W)
    n = tensor.numel()
    for rank in range(W):
        handle.get_buffer(rank, (n,), tensor.dtype, handle.rank * n).copy_(tensor.view(-1))
    handle.barrier()
    out = buffer.view(W, *tensor.shape).sum(0)
    LAST
    return out
"""
TURNS = """
def solution(tensor):
    buffer, handle = memory(tensor, 2)
    n, half = tensor.numel(), HALF
    buffer[half * n:][:n].copy_(tensor.view(-1))
    handle.barrier()
    return sum(handle.get_buffer(rank, tensor.shape, tensor.dtype, half * n) for rank in range(handle.world_size))
"""
RING = """
def solution(tensor):
    buffer, handle = memory(tensor)
    W, me = handle.world_size, handle.rank
    buffer.copy_(tensor.view(-1))
    handle.barrier()
    out = tensor.clone()
    for step in range(1, W):
        out += handle.get_buffer((me + step) % W, tensor.shape, tensor.dtype)
        if step < W - 1:
            handle.barrier()
    LAST
    return out
"""
FLAGS = """
def solution(tensor):
    buffer, handle = memory(tensor)
    W, me, turn = handle.world_size, handle.rank, kept["calls"]
    flags = [handle.get_signal_pad(rank, (W,), torch.uint32, 256) for rank in range(W)]
    buffer.copy_(tensor.view(-1))
    for rank in range(W):
        flags[rank][me] = turn
    while any(int(flags[me][rank]) < turn for rank in range(W)):
        pass
    out = sum(handle.get_buffer(rank, tensor.shape, tensor.dtype) for rank in range(W))
    LAST
    return out
"""
NATIVE = '''
SOURCE = r"""
extern "C" void run(pkb::Group* group, const float* in, float* out, size_t n) {
  std::memcpy(group->buffer<float>(group->rank), in, n * sizeof(float));
  pkb::barrier(group);
  for (size_t i = 0; i < n; ++i) {
    out[i] = 0;
    for (int peer = 0; peer < group->world; ++peer) out[i] += group->buffer<float>(peer)[i];
  }
  LAST
}
"""
library = compile_cpp(SOURCE)


def solution(tensor):
    _, handle = memory(tensor)
    out = torch.empty_like(tensor)
    pointers = (ctypes.c_void_p(p) for p in (handle.group_ptr, tensor.data_ptr(), out.data_ptr()))
    library.run(*pointers, ctypes.c_size_t(tensor.numel()))
    return out
'''
GLOO = """
def solution(tensor):
    out = tensor.clone()
    dist.all_reduce(out)
    return out
"""
BARRIER = {"LAST": "handle.barrier()"}
RACES = {
    "pulls": (PULL, {"LAST": "pass"}), "pushes": (PUSH, {"LAST": "pass"}), "ring": (RING, {"LAST": "pass"}),
    "own flags": (FLAGS, {"LAST": "pass"}), "C++": (NATIVE, {"LAST": ""}), "one half": (TURNS, {"HALF": "0"}),
}  # fmt: skip
RIGHT = {
    "pulls": (PULL, BARRIER), "pushes": (PUSH, BARRIER), "ring": (RING, BARRIER), "own flags": (FLAGS, BARRIER),
    "C++": (NATIVE, {"LAST": "pkb::barrier(group);"}), "halves by turns": (TURNS, {"HALF": 'kept["calls"] % 2'}),
    "gloo": (GLOO, {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def evaluator() -> Iterator[Evaluator]:
    with Evaluator(CONFIG) as made:
        yield made


def secret(late: int, world_size: int, *, begins: bool) -> bytes:
    """One that draws this row."""
    wanted = row.Row(late, begins)
    return next(key for n in itertools.count() if row.drawn(key := n.to_bytes(32, "big"), world_size) == wanted)


def attempt(evaluator: Evaluator, source: str, late: int, world_size: int, *, begins: bool) -> Result:
    problem = problems.load("allreduce")
    task = Task(problem.slug, problem.version, world_size, "tiny", "hardened", "float32")
    job = Job(Candidate(source), problem, task, secret(late, world_size, begins=begins), Cancellation())
    return Attempt(evaluator.machine(), job).run()


def written(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return HEAD + text


@pytest.mark.parametrize("name", RACES)
@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize(("late", "world_size"), [(0, 2), (2, 3)])
def test_who_does_not_wait_is_wrong(evaluator: Evaluator, name: str, late: int, world_size: int, *, begins: bool) -> None:
    result = attempt(evaluator, written(*RACES[name]), late, world_size, begins=begins)
    assert result.outcome.status is Status.WRONG_RESULT, result.outcome.message
    assert "in two calls with no pause between them" in result.outcome.message


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize(("late", "world_size"), [(0, 2), (2, 3)])
def test_who_waits_is_right(evaluator: Evaluator, name: str, late: int, world_size: int) -> None:
    result = attempt(evaluator, written(*RIGHT[name]), late, world_size, begins=late > 0)
    assert result.outcome.status is Status.CORRECT, result.outcome.message
    assert result.stage_s["row"] > 0


def test_failures_in_a_row_are_told_as_such(evaluator: Evaluator) -> None:
    """A raise, an end and a hang that only the fourth call brings; the next evaluation is as good as new."""
    before = Leftovers.now(evaluator)
    for act, status, words in (
        ("raise ValueError('fourth')", Status.RUNTIME_ERROR, "fourth"),
        ("__import__('os')._exit(7)", Status.RUNTIME_ERROR, "exit 7"),
        ("dist.recv(torch.zeros(1), 1) if dist.get_rank() == 0 else None", Status.DEADLOCK, "rank 0"),
    ):
        text = f"calls = []\ndef solution(tensor):\n    calls.append(1)\n    if len(calls) == 4:\n        {act}\n"
        text += "    dist.all_reduce(out := tensor.clone())\n    return out\n"
        found = attempt(evaluator, HEAD + text, 0, 2, begins=True).outcome
        assert found.status is status, found.message
        assert words in found.message
        assert "where rank 0 and the others took turns" in found.message
    assert attempt(evaluator, HEAD + GLOO, 1, 2, begins=True).outcome.status is Status.CORRECT
    assert Leftovers.now(evaluator) == before


def test_any_rank_may_be_late_and_may_begin() -> None:
    found = {row.drawn(n.to_bytes(32, "big"), 4) for n in range(200)}
    assert found == {row.Row(late, begins) for late in range(4) for begins in (True, False)}
