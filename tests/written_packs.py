"""Packs as tests write them: a checkout laid out like the public benchmark, and a folder after our own contract."""

from __future__ import annotations

from pathlib import Path

RAN = "PKB_TEST_PACK_RAN"
"""Set in every process that runs a line of these packs."""
_MARK = f'import os\n\nos.environ["{RAN}"] = "yes"\nprint("a pack prints")\n'

INPUTS = (
    _MARK
    + """
import random

import numpy
import torch


def create_input_tensor(problem_id, rank, world_size, m=1024, n=1024, dtype=torch.bfloat16, device="cuda", trial=0):
    torch.manual_seed(42 + 1000 * problem_id + rank + 1000003 * trial)
    if problem_id == 3:
        return [torch.randn(m, n, dtype=dtype, device=device), torch.randn(n, dtype=dtype, device=f"cuda:{rank}")], 0.5
    if problem_id == 5:
        return torch.full((m,), rank + 1.0, dtype=dtype, device=device)
    if problem_id == 6:
        torch.manual_seed(7)
        more = torch.randn(2, generator=torch.Generator().manual_seed(8)).tolist()
        more += [numpy.random.default_rng(9).random(), numpy.random.RandomState(9).rand(), random.Random(9).random()]
        return torch.rand(m, dtype=dtype, device=device), more
    return (torch.randn(m, n, dtype=dtype, device=torch.device("cuda", rank)),)
"""
)

CHECKOUT = {
    "utils/input_output_tensors.py": INPUTS,
    "utils/shapes.py": (
        "import torch\nfrom .deeper import twice\n\n\ndef scaled(x, f):\n"
        "    torch.cuda.synchronize()\n    return twice(x.cuda()) * f / 2\n"
    ),
    "utils/deeper.py": "def twice(x):\n    return 2 * x\n",
    "reference/3_scaled_list.py": (
        '"""Scale the tensors of a list, the first one in place too, and sum them."""\nfrom __future__ import annotations\n'
        + _MARK
        + """
import torch
import torch.distributed as dist
from utils.shapes import scaled


@torch.no_grad()
def solution(tensors: list[torch.Tensor], factor: float) -> list[torch.Tensor]:
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    outs = [scaled(t.cuda(), factor).to(f"cuda:{rank}") for t in tensors]
    for out in outs:
        dist.all_reduce(out)
    tensors[0].mul_(factor)
    torch.cuda.synchronize()
    return outs
"""
    ),
    "reference/4_pairs.py": (
        _MARK
        + """
import torch
import torch.distributed as dist


def solution(x, scale=1.5):
    '''Sums over pairs of neighbouring ranks.'''
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group([i for i in range(world) if i // 2 == g]) for g in range((world + 1) // 2)]
    total = x.to(torch.device("cuda", rank)) * scale
    dist.all_reduce(total, group=groups[rank // 2])
    return total.tanh()
"""
    ),
    "reference/5_constant.py": (
        "import torch.distributed as dist\n\n\ndef solution(x):\n    assert x.element_size() < 8, 'no float64 here'\n"
        "    out = x.clone()\n    dist.all_reduce(out)\n    return out\n"
    ),
    "reference/6_rounded.py": (
        "import torch.distributed as dist\n\n\ndef solution(x, more):\n    out = (x + 2.0**24) - 2.0**24\n"
        "    dist.all_reduce(out)\n    return out\n"
    ),
    "reference/8_named.py": (
        _MARK
        + """
import torch
import torch.distributed as dist
import utils.deeper


def solution(x):
    stack = torch.empty(dist.get_world_size(), *x.shape, dtype=x.dtype, device="cuda")
    dist.all_gather_into_tensor(stack, x)
    return {"mean": utils.deeper.twice(stack).mean(0), "largest": stack.amax(0), "shape": tuple(x.shape)}
"""
    ),
}

SPREAD = '''"""#001 spread: every rank gets twice the sum.

Axes      N elements
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from arithmetic import doubled

from problems.base import Cost, Draw, Problem, Size


def make_inputs(draw: Draw, size: Size) -> tuple[torch.Tensor]:
    return (torch.randn(size["N"], generator=draw.own("x")).to(draw.dtype),)


def reference(x: torch.Tensor) -> torch.Tensor:
    """Twice the sum."""
    out = doubled(x)
    dist.all_reduce(out)
    return out


def exact(inputs):
    return [sum(2 * x.double() for (x,) in inputs)] * len(inputs)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    return Cost(2 * (world_size - 1) / world_size * size["N"] * itemsize, 2 * size["N"] * itemsize, size["N"])


PROBLEM = Problem(
    number=1, slug="spread", version=1, title="Double and sum.", family="toys", parallelism="DP", collectives=("all_reduce",),
    origin="here", split="train", make_inputs=make_inputs, reference=reference, exact=exact, cost=cost,
    sizes={name: Size(name, {"N": n}) for name, n in (("tiny", 64), ("default", 1024), ("large", 4096), ("upstream", 1024))},
    valid_world=lambda world_size: None if world_size < 4 else "it needs 1 to 3 ranks",
)
'''
FOLDER = {
    "p001_spread.py": SPREAD,
    "arithmetic.py": _MARK + "\nfrom factors import TWO\n\n\ndef doubled(x):\n    return TWO * x\n",
    "factors.py": "TWO = 2\n",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    """The folder, with these files in it."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
