"""Through real boxes on a GPU: what is right passes, what leaves the work out does not, what breaks leaves nothing behind.

The examples are in `test_gpu_examples`, what a CPU can show of the walls in `test_gpu_walls`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

import problems
from pkb_env.config import EvalConfig
from pkb_env.evaluator import Evaluator
from pkb_env.lazy import silenced_source
from pkb_env.submission import Submission
from rewards.verdict import Status, Verdict

pytestmark = pytest.mark.gpu

PLACES = [("node", 1), ("shared", 2), ("shared", 4)]
GOOD = problems.reference_source(problems.load("allreduce"))
KERNEL = '''
import pkb_box
import torch

SOURCE = r"""
__global__ void work(float *x, int kind) {
    if (kind == 0) { x[1ull << 60] = 1.0f; }
    if (kind == 1) { while (*(volatile float *)x < 1e30f) {} }
    if (kind == 2) { __trap(); }
}
extern "C" void launch(float *x, int kind, void *stream) { work<<<1, 1, 0, (cudaStream_t)stream>>>(x, kind); }
"""
library = pkb_box.compile_cuda(SOURCE)
library.launch.argtypes = [__import__("ctypes").c_void_p, __import__("ctypes").c_int, __import__("ctypes").c_void_p]


def solution(tensor):
    cell = torch.zeros(1, device=tensor.device)
    library.launch(cell.data_ptr(), KIND, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return tensor
'''
FAULTS = {
    "illegal address": (KERNEL.replace("KIND", "0"), {Status.RUNTIME_ERROR}),
    "endless kernel": (KERNEL.replace("KIND", "1"), {Status.TIMEOUT, Status.DEADLOCK}),
    "trap": (KERNEL.replace("KIND", "2"), {Status.RUNTIME_ERROR}),
    "exit": ("import os\ndef solution(tensor): os._exit(3)", {Status.RUNTIME_ERROR}),
    "host answer": ("def solution(tensor): return tensor.cpu()", {Status.WRONG_RESULT}),
    "too much memory": ("import torch\ndef solution(tensor): return torch.empty(1 << 50, device='cuda')", {Status.OUT_OF_MEMORY}),
    "own process": ("import os\ndef solution(tensor): os.fork()", {Status.RUNTIME_ERROR}),
    "nothing": ("def solution(tensor): return None", {Status.WRONG_RESULT}),
}


@pytest.fixture(scope="module")
def evaluator() -> Iterator[Evaluator]:
    with Evaluator(EvalConfig(trials=2, pairs=0, call_deadline_s=5.0)) as made:
        yield made


def verdict_of(evaluator: Evaluator, source: str, topology: str = "node", world_size: int = 1, backend: str = "torch") -> Verdict:
    return evaluator.evaluate(Submission(source, "allreduce", backend, world_size, topology, size="tiny"))


def on_the_gpu() -> set[str]:
    """Process ids that the driver sees."""
    ask = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    return set(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(("topology", "world_size"), PLACES)
@pytest.mark.parametrize("name", problems.names())
def test_admission(evaluator: Evaluator, name: str, topology: str, world_size: int) -> None:
    problem = problems.load(name)
    asked = [
        Submission(s, name, "torch", world_size, topology, size="tiny")
        for s in (problems.reference_source(problem), silenced_source(problem))
    ]
    right, lazy = map(evaluator.evaluate, asked)
    assert right.status is Status.CORRECT, right.message
    assert right.dtype == "bfloat16"
    assert lazy.status is (Status.CORRECT if world_size == 1 else Status.WRONG_RESULT), lazy.message


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_its_status_and_the_next_one_is_right(evaluator: Evaluator, name: str) -> None:
    source, statuses = FAULTS[name]
    verdict = verdict_of(evaluator, source, backend="cuda")
    print(f"{name}: {verdict.status} {verdict.message} {dict(verdict.stage_s)}")
    assert verdict.status in statuses, verdict.message
    assert verdict_of(evaluator, GOOD).correct


@pytest.mark.parametrize(("gib", "status"), [(60, Status.CORRECT), (110, Status.OUT_OF_MEMORY)])
def test_torch_gives_a_rank_its_share_of_the_gpu(evaluator: Evaluator, gib: int, status: Status) -> None:
    """Seven tenths of it; the numbers are for GPUs of 141 GB."""
    source = f"import torch\nheld = torch.empty({gib} << 30, dtype=torch.uint8, device='cuda')\n{GOOD}"
    verdict = verdict_of(evaluator, source)
    assert verdict.status is status, verdict.message


def test_a_rank_that_never_arrives_is_named(evaluator: Evaluator) -> None:
    body = "def solution(tensor):\n    if dist.get_rank() == 0:\n        dist.all_reduce(tensor)\n    return tensor"
    source = f"import torch.distributed as dist\n{body}"
    verdict = verdict_of(evaluator, source, "shared", 2)
    assert verdict.status is Status.DEADLOCK, verdict.message
    assert "rank 0" in verdict.message
    assert "line 4" in verdict.message


def test_thirty_faults_leave_no_process_on_the_gpu() -> None:
    before = on_the_gpu()
    with Evaluator(EvalConfig(trials=1, pairs=0, call_deadline_s=1.0)) as evaluator:
        for source in [source for source, _ in FAULTS.values()] * 4:
            assert not verdict_of(evaluator, source, backend="cuda").correct
        assert verdict_of(evaluator, GOOD).correct
    assert on_the_gpu() <= before


def test_a_timed_reference_is_not_faster_than_itself() -> None:
    with Evaluator(EvalConfig(trials=1, time_budget_s=0.7)) as evaluator:
        verdict = evaluator.evaluate(Submission(GOOD, "allreduce", "torch", 1, "node"))
        shared = evaluator.evaluate(Submission(GOOD, "allreduce", "torch", 2, "shared", size="tiny"))
    assert verdict.correct
    assert verdict.comparable
    assert not verdict.faster
    assert verdict.hardware.startswith("NVIDIA")
    assert shared.correct
    assert not shared.comparable
