"""#012 allgather_gemm: columns of A are gathered from all ranks and multiplied with a B of the rank's own.

Axes      M rows, N columns, K inner extent in all (split: L = K // W on a rank), W ranks
In        A_local [M, L] and B [W*L, N], both differ per rank; rank r holds columns r*L .. (r+1)*L - 1 of A
Out       [M, N], differs per rank
Maths     out_r = A @ B_r, where A = A_0, A_1, ... side by side; rounded to the dtype once
Wire      all_gather of A_local: a rank sends (W-1)*M*L elements, without multicast
Needs     any W; of K what W divides is used
Not here  a B that ranks share, bias, activation
"""

from __future__ import annotations

import torch

from problems.base import Problem, Size
from problems.collectives import gathered
from problems.gemm import gathered_cost, gathered_inputs, gathered_truth


def reference(A_local: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """A @ B, [M, N]."""
    rows, local = A_local.shape
    a = gathered(A_local).view(-1, rows, local).transpose(0, 1).reshape(rows, -1)
    return a @ B


PROBLEM = Problem(
    number=12,
    slug="allgather_gemm",
    version=1,
    title="Gather the columns of A from all ranks and multiply A with the rank's own B.",
    family="gemm-collective",
    parallelism="TP",
    collectives=("all_gather",),
    origin="Megatron-LM (async tensor parallelism)",
    split="train",
    sizes={
        "tiny": Size("tiny", {"M": 61, "N": 67, "K": 72}),
        "default": Size("default", {"M": 256, "N": 320, "K": 320}),
        "odd": Size("odd", {"M": 253, "N": 323, "K": 319}),
        # 128 MiB each of A, B and the product in bf16, 1.1 TFLOP.
        "large": Size("large", {"M": 8192, "N": 8192, "K": 8192}),
        "upstream": Size("upstream", {"M": 1024, "N": 1024, "K": 512}),
    },
    make_inputs=gathered_inputs,
    reference=reference,
    exact=gathered_truth,
    cost=gathered_cost,
)
