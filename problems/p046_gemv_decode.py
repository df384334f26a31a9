"""#046 gemv_decode: logits of a few tokens from a head whose vocabulary is split over ranks.

Axes      T tokens (the size's, fewer and 1 in turns), K hidden extent, V ids on a rank (W*V in all), W ranks
In        hidden_states [T, K], equal on every rank; weight_shard [V, K] and bias_shard [V], differ per rank
Out       [T, W*V], equal on every rank: rank r's ids are columns r*V .. (r+1)*V - 1
Maths     out = hidden_states @ weight^T + bias, weight and bias being all ranks' shards one after another
Wire      all_gather: a rank receives (W-1)*T*V elements, and sends as many without multicast
Needs     any W; V need not be a multiple of anything
Not here  shards of unequal size, sampling, log-softmax
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from problems.base import Cost, Draw, Problem, Size
from problems.collectives import gathered
from problems.draws import turn

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_inputs(draw: Draw, size: Size) -> Inputs:
    """Normal values, weights scaled so that product and bias are alike; all tokens, about half of them, and one take turns."""
    tokens, inner, local = size["T"], size["K"], size["V"]
    weight = torch.randn(local, inner, generator=draw.own("weight_shard"))
    if draw.profile == "hardened":
        tokens = (tokens, -(-tokens // 2), 1)[turn(draw, 3)]
        weight *= inner**-0.5
    hidden = torch.randn(tokens, inner, generator=draw.shared("hidden_states"))
    bias = torch.randn(local, generator=draw.own("bias_shard"))
    return hidden.to(draw.dtype), weight.to(draw.dtype), bias.to(draw.dtype)


def reference(hidden_states: torch.Tensor, weight_shard: torch.Tensor, bias_shard: torch.Tensor) -> torch.Tensor:
    """Logits of all ids, [T, W*V]."""
    logits = hidden_states @ weight_shard.T + bias_shard
    # Flat, all ranks' blocks lie one after another; side by side is what is wanted.
    blocks = gathered(logits).view(dist.get_world_size(), *logits.shape)
    return blocks.transpose(0, 1).reshape(len(hidden_states), -1)


def exact(inputs: Sequence[Inputs]) -> list[torch.Tensor]:
    """One product with the joined vocabulary in float64, the bias as a column of the weights."""
    hidden = torch.nn.functional.pad(inputs[0][0].double(), (0, 1), value=1)
    head = torch.cat([torch.column_stack([weight.double(), bias.double()]) for _, weight, bias in inputs])
    return [torch.einsum("tk,vk->tv", hidden, head)] * len(inputs)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """A single token, the least of a turn: weights are read, and the logits of one's ids go to every other rank."""
    inner, local = size["K"], size["V"]
    return Cost(
        wire_bytes=(world_size - 1) * local * itemsize,
        memory_bytes=(local * (inner + 1) + inner + world_size * local) * itemsize,
        flops=local * (2 * inner + 1),
    )


PROBLEM = Problem(
    number=46,
    slug="gemv_decode",
    version=1,
    title="Logits of a few tokens from a head whose vocabulary is split over ranks; every rank gets all of them.",
    family="gemm-collective",
    parallelism="TP",
    collectives=("all_gather",),
    origin="Megatron-LM and vLLM vocabulary-parallel head, decoding",
    split="train",
    sizes={
        "tiny": Size("tiny", {"T": 5, "K": 61, "V": 67}),
        "default": Size("default", {"T": 8, "K": 512, "V": 2003}),
        "odd": Size("odd", {"T": 7, "K": 509, "V": 1999}),
        # A shard of a vocabulary of 131112: 256 MiB of weights on a rank in bf16.
        "large": Size("large", {"T": 8, "K": 8192, "V": 16389}),
        "upstream": Size("upstream", {"T": 1, "K": 1024, "V": 1024}),
    },
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
