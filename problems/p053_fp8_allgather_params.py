"""#053 fp8_allgather_params: every rank rounds its shard to fp8 at its own delayed scale; all ranks get all shards.

Axes      P elements of a shard (W*P in all), W ranks, 16 former maxima
In        flat_param_shard [P] and amax_history [16], differ per rank
Out       (all shards in rank order, [W*P] in the dtype of the shard, equal on every rank; the rank's new history, [16] in its
          own dtype)
Maths     history: all entries move one place to the left, the last becomes max |x| over the shard;
          scale = max(largest entry of the new history, 1e-12) / 448; out = scale * e4m3(x / scale), to nearest even, in float32
Wire      all_gather; as fp8 a rank sends P bytes and a scale to every other one, without multicast
Needs     any W
Not here  one scale for all ranks, other formats, unequal shards
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from problems.base import Cost, Draw, Problem, Size, Tolerance
from problems.collectives import gathered
from problems.fp8 import fp8_round_trip
from problems.fp8_cases import draw_delayed, exact_delayed

Inputs = tuple[torch.Tensor, torch.Tensor]


def make_inputs(draw: Draw, size: Size) -> Inputs:
    """Parameters with outliers and histories that decide the scale or do not; no quotient is close to a tie."""
    return draw_delayed(draw, "flat_param_shard", (size["P"],))


def reference(flat_param_shard: torch.Tensor, amax_history: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' rounded shards, [W*P], and this rank's history, [16]."""
    rounded, history = fp8_round_trip(flat_param_shard, amax_history)
    return gathered(rounded), history


def exact(inputs: Sequence[Inputs]) -> list[Inputs]:
    """All ranks' rounded shards in float64."""
    rounded, histories = zip(*(exact_delayed(*args) for args in inputs), strict=True)
    whole = torch.cat(rounded)
    return [(whole, history) for history in histories]


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """A byte per element and the scale to every other rank; the shard is read, the whole is written."""
    count = size["P"]
    return Cost(
        wire_bytes=(world_size - 1) * (count + 4),
        memory_bytes=(1 + world_size) * count * itemsize,
        flops=3 * count,
    )


PROBLEM = Problem(
    number=53,
    slug="fp8_allgather_params",
    version=1,
    title="Round the local shard to fp8 with delayed scaling and gather all shards on every rank.",
    family="quantisation",
    parallelism="FSDP",
    collectives=("all_gather_into_tensor",),
    origin="Transformer Engine, torchao float8 FSDP all-gather",
    split="train",
    sizes={
        "tiny": Size("tiny", {"P": 1009}),
        "default": Size("default", {"P": 131072}),
        "odd": Size("odd", {"P": 131071}),
        # 128 MiB in and 1 GiB out in bf16 at W = 8.
        "large": Size("large", {"P": 2**26}),
        "upstream": Size("upstream", {"P": 4096}),
    },
    # No tie decides, so nothing but three roundings remains; leaving fp8 out is 2.6 % off.
    tolerance=Tolerance(inner_ulps=4),
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
