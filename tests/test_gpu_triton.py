"""Candidates in Triton, through real boxes on a GPU; what a CPU can show of them is in `test_triton_toolchain`.

The examples with ranks that share a GPU are in `test_gpu_examples`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pkb_env.config import EvalConfig
from pkb_env.evaluator import Evaluator
from pkb_env.submission import Submission
from rewards.verdict import Status, Verdict

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).parents[1] / "examples"
KERNEL = """import torch
import torch.distributed as dist
import triton
import triton.language as tl

calls = 0


AUTOTUNE@triton.jit
def copy(source, target, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + at, mask=at < n)
    tl.store(target + at, VALUE, mask=at < n)


def solution(tensor):
    global calls
    calls += 1
    source, target = tensor.contiguous(), torch.empty_like(tensor)
    copy[lambda meta: (triton.cdiv(source.numel(), meta["BLOCK"]),)](source, target, source.numel(), BLOCKS)
    dist.all_reduce(target)
    return target
"""
CONFIGS = ", ".join(f'triton.Config({{"BLOCK": {size}}})' for size in (256, 512, 1024))
ASSEMBLY = 'tl.inline_asm_elementwise("nothing.b16 $0, $1;", "=h,h", [value], dtype=value.dtype, is_pure=True, pack=1)'


def kernel(value: str = "value", autotune: str = "", blocks: str = "BLOCK=1024") -> str:
    return KERNEL.replace("VALUE", value).replace("AUTOTUNE", autotune).replace("BLOCKS", blocks)


@pytest.fixture(scope="module")
def evaluator() -> Iterator[Evaluator]:
    with Evaluator(EvalConfig(trials=2, pairs=0)) as made:
        yield made


def verdict_of(evaluator: Evaluator, source: str, where: str = "node", world_size: int = 1, slug: str = "allreduce") -> Verdict:
    verdict = evaluator.evaluate(Submission(source, slug, "triton", world_size, where, size="tiny"))
    print(f"{verdict.status} {verdict.message} first call {verdict.first_call_ms} ms {dict(verdict.stage_s)}")
    return verdict


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("triton_*.py")), ids=lambda path: path.stem)
def test_an_example_is_correct_on_a_gpu_of_its_own(evaluator: Evaluator, path: Path) -> None:
    verdict = verdict_of(evaluator, path.read_text(encoding="utf-8"), slug=path.stem.removeprefix("triton_"))
    assert verdict.correct, f"{verdict.message}\n{verdict.ranks}"


def test_the_second_evaluation_starts_no_program(evaluator: Evaluator) -> None:
    counters = evaluator.machine().broker.counters
    assert verdict_of(evaluator, kernel(), "shared", 2).correct
    built = counters.built
    assert verdict_of(evaluator, kernel(), "shared", 2).correct
    assert counters.built == built


def test_a_kernel_may_be_tuned(evaluator: Evaluator) -> None:
    tuned = kernel(autotune=f"@triton.autotune([{CONFIGS}], key=['n'])\n", blocks="")
    assert verdict_of(evaluator, tuned).correct


@pytest.mark.parametrize(("value", "said"), [
    ("value + MISSING", "candidate.py:13: error: NameError"),
    ("tl.dot(value, value)", "candidate.py:13: error: "),
    (ASSEMBLY, "candidate.py:13: error: in what this line became\nptxas kernel.ptx, line "),
])  # fmt: skip
def test_a_kernel_that_does_not_compile_is_named_by_its_line(evaluator: Evaluator, value: str, said: str) -> None:
    verdict = verdict_of(evaluator, kernel(value), "shared", 2)
    assert verdict.status is Status.COMPILE_ERROR, verdict.message
    assert said in verdict.message
    assert "/tmp" not in verdict.message  # noqa: S108


def test_nothing_is_compiled_while_calls_are_timed() -> None:
    late = kernel(blocks="BLOCK=1024 if calls < 4 else 2048")
    with Evaluator(EvalConfig(trials=1)) as evaluator:
        verdict = verdict_of(evaluator, late)
        usual = verdict_of(evaluator, kernel())
    assert verdict.status is Status.COMPILE_ERROR, verdict.message
    assert "no compiler runs while calls are timed" in verdict.message
    assert usual.correct
    assert usual.pairs
