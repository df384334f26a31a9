"""The worked examples against plain torch.distributed: many shapes and layouts, repeated calls, outputs that stay what they were.

Not here: the examples inside a box, judged and timed.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from symm_ranks import ROOT, Here, build, join, launcher

import problems

EXAMPLES = sorted(p.stem for p in (ROOT / "examples").glob("*.py") if p.stem.startswith(("cpp_", "torch_")))
SHAPES = [(64, 128), (7, 3), (1, 1), (129, 257), (64, 128), (3, 5, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def example(name: str) -> Callable[..., Any]:
    """`solution` of an example, loaded as a box does."""
    importlib.import_module("pkb_box.compile").connect(build)
    module = types.ModuleType(name)
    source = (ROOT / "examples" / f"{name}.py").read_text()
    exec(compile(source, f"{name}.py", "exec"), module.__dict__)  # noqa: S102  as a box does
    solution: Callable[..., Any] = module.solution
    return solution


def values(here: Here, call: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Every third one lies in memory in another order than its shape says."""
    found = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * call + here.rank)).to(dtype)
    return found.transpose(0, -1).contiguous().transpose(0, -1) if call % 3 == 2 else found


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


def close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert got.dtype == dtype
    rough = dtype in (torch.bfloat16, torch.float16)
    torch.testing.assert_close(got.double(), wanted.double(), rtol=2e-2 if rough else 1e-5, atol=5e-2 if rough else 1e-5)


def body_allreduce(here: Here, name: str) -> None:
    join(here)
    solution, kept = example(name), []
    for call, (shape, dtype) in enumerate([(s, d) for d in DTYPES for s in SHAPES] + [(s, d) for s in SHAPES for d in DTYPES]):
        x = values(here, call, *shape, dtype=dtype)
        before = x.clone()
        got = solution(x)
        wanted = torch.stack(gathered(x)).double().sum(0)
        close(got, wanted, dtype)
        assert torch.equal(x, before)
        kept.append((got, got.clone()))
    assert all(torch.equal(a, b) for a, b in kept), "a later call changed the output of an earlier one"


def body_allgather(here: Here, name: str) -> None:
    join(here)
    solution, kept = example(name), []
    for call, shape in enumerate(SHAPES * 3):
        x = values(here, call, *shape, dtype=DTYPES[call % 3])
        got = solution(x)
        assert torch.equal(got, torch.stack(gathered(x)))
        kept.append((got, got.clone()))
    assert all(torch.equal(a, b) for a, b in kept)


def body_reducescatter(here: Here, name: str) -> None:
    join(here)
    solution, kept = example(name), []
    for call, (rows, *rest) in enumerate(SHAPES * 3):
        x = values(here, call, rows * here.world, *rest, dtype=DTYPES[call % 3])
        got = solution(x)
        close(got, torch.stack(gathered(x)).double().sum(0).chunk(here.world)[here.rank], x.dtype)
        kept.append((got, got.clone()))
    assert all(torch.equal(a, b) for a, b in kept)


def body_gemm_allreduce(here: Here, name: str) -> None:
    join(here)
    solution, kept = example(name), []
    for call, (m, k, n) in enumerate([(32, 16, 48), (5, 7, 3), (1, 64, 1), (65, 33, 31), (32, 16, 48)] * 2):
        dtype = DTYPES[0] if call < 5 else DTYPES[call % 3]
        a, b = (values(here, 2 * call + i, *s, dtype=dtype) / k**0.25 for i, s in enumerate([(m, k), (k, n)]))
        got = solution(a, b)
        close(got, torch.stack(gathered(a @ b)).double().sum(0), dtype)
        kept.append((got, got.clone()))
    assert all(torch.equal(a, b) for a, b in kept)


def body_ring_attention(here: Here, name: str) -> None:
    join(here)
    solution = example(name)
    for call, (b, s, h, d) in enumerate([(2, 8, 8, 16), (1, 1, 4, 8), (1, 33, 2, 64), (2, 8, 8, 16)]):
        q, k, v = (values(here, 3 * call + i, b, s, h, d) for i in range(3))
        keys, all_values = (torch.cat(gathered(t), 1).transpose(1, 2).double() for t in (k, v))
        for causal, scale in ((False, None), (True, None), (True, 0.7)):
            scores = q.transpose(1, 2).double() @ keys.transpose(-1, -2) * (scale or d**-0.5)
            later = torch.arange(s * here.world)[None] > torch.arange(s)[:, None] + here.rank * s
            weights = scores.masked_fill(later & causal, -torch.inf).softmax(-1)
            close(solution(q, k, v, scale, causal), (weights @ all_values).transpose(1, 2))


def body_vocab_parallel_cross_entropy_loss(here: Here, name: str) -> None:
    join(here)
    solution = example(name)
    for call, (b, t, v) in enumerate([(2, 16, 32), (1, 1, 4), (3, 7, 65), (2, 16, 32), (1, 9, 40_000), (3, 7, 65)]):
        logits = values(here, call, b, t, v) * 4 + here.rank
        target = torch.randint(0, v * here.world, (b, t), generator=torch.Generator().manual_seed(call))
        whole = torch.cat(gathered(logits), -1)
        wanted = logits - whole.amax(-1, keepdim=True)
        loss = torch.nn.functional.cross_entropy(whole.double().flatten(0, 1), target.flatten(), reduction="none")
        close(solution(logits, target), loss.view(b, t))
        close(logits, wanted)


def body_groups(here: Here, name: str) -> None:
    """Calls in the group of all ranks and in one of two halves take turns; 1e30 marks an entry that nobody may choose."""
    join(here)
    solution, size = example(name), here.world // 2
    halves = [dist.new_group(list(range(first, first + size))) for first in (0, size)]
    for call in range(6):
        group, first, ranks = (None, 0, here.world) if call % 2 else (halves[here.rank // size], here.rank // size * size, size)
        logits = values(here, call, 5, 12)
        logits[:, 3] = -1e30
        whole = torch.cat(gathered(logits)[first : first + ranks], -1)
        target = 12 * (torch.arange(5) % ranks)
        wanted = torch.nn.functional.cross_entropy(whole.double(), target, reduction="none")
        close(solution(logits, target, group), wanted)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    with launcher(tmp_path_factory.mktemp("ranks"), tmp_path_factory.getbasetemp() / "toolchain", __name__) as start:
        yield start


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(run: Callable[..., None], name: str, world: int) -> None:
    run(name.partition("_")[2], world, name)


@pytest.mark.parametrize("world", [*(pytest.param(world, marks=pytest.mark.slow) for world in (1, 5)), 3])
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name.startswith("cpp_")])
def test_odd_worlds(run: Callable[..., None], name: str, world: int) -> None:
    run(name.partition("_")[2], world, name)


@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_groups(run: Callable[..., None], backend: str) -> None:
    run("groups", 4, f"{backend}_vocab_parallel_cross_entropy_loss")


def test_whatever_has_an_example_has_one_of_each_backend_of_the_cpu() -> None:
    slugs = {name.partition("_")[2] for name in EXAMPLES if name.startswith(("cpp_", "torch_"))}
    assert len(slugs) >= 6
    assert {f"{backend}_{slug}" for backend in ("cpp", "torch") for slug in slugs} <= set(EXAMPLES)
    assert slugs <= set(problems.names())
