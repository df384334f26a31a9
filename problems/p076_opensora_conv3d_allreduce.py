"""#076 opensora_conv3d_allreduce: a 3-D convolution whose input channels are spread over ranks.

Axes      B batch, I input channels on one rank, O output channels, T Y X extents of the video, W ranks
In        input [B, I, T, Y, X] and weight [O, I / groups, k, k, k], differ per rank; bias [O] or None, stride, padding, dilation
          (int or 3 of them), groups, equal on every rank; group (None: all ranks)
Out       [B, O, T', Y', X'], equal on every rank
Maths     sum over ranks s of conv3d(input_s, weight_s), each rounded to the dtype, plus bias per output channel, once
Wire      all_reduce of the output
Needs     I and O are multiples of groups
Not here  chunks of channels for more than 2^31 elements, sharded outputs, gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size
from problems.draws import turn

OPTIONS: tuple[tuple[Any, ...], ...] = ((1, 0, 1, 1), (1, 1, 1, 2), (2, 1, 1, 1), ((1, 2, 1), (1, 0, 2), (1, 1, 2), 1))
"""Stride, padding, dilation and groups that take turns."""


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Normal values; products are O(1), at a scale of its own per rank; bias is O(1), missing in one trial of five."""
    upstream = draw.profile == "upstream"
    options = OPTIONS[0] if upstream else OPTIONS[turn(draw, len(OPTIONS))]
    outs, channels = size["O"], max(1, size["O"] // draw.world_size) if upstream else size["I"]
    video = torch.randn(size["B"], channels, size["T"], size["Y"], size["X"], generator=draw.own("input"))
    weight = torch.randn(outs, channels // options[3], *[size["k"]] * 3, generator=draw.own("weight"))
    if upstream:
        return video.to(draw.dtype), weight.to(draw.dtype), torch.linspace(-0.1, 0.1, outs).to(draw.dtype), *options, None
    order = torch.randperm(draw.world_size, generator=draw.shared("scale"))
    weight *= weight[0].numel() ** -0.5 * 2.0 ** (int(order[draw.rank]) % 4 / 2)
    bias = torch.randn(outs, generator=draw.shared("bias")).to(draw.dtype) if turn(draw, 5, "bias") else None
    return video.to(draw.dtype), weight.to(draw.dtype), bias, *options, None


def reference(
    input: torch.Tensor,  # noqa: A002
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: int | tuple[int, int, int],
    padding: int | tuple[int, int, int],
    dilation: int | tuple[int, int, int],
    groups: int = 1,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Sum over ranks of the local convolutions, plus bias, [B, O, T', Y', X']."""
    out = F.conv3d(input, weight, None, stride, padding, dilation, groups).contiguous()
    dist.all_reduce(out, group=group)
    return out if bias is None else out.add_(bias.view(-1, 1, 1, 1))


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """One tap of the kernel after the other: products of strided windows of the padded video, in float64."""
    _, _, bias, stride, padding, dilation, groups, _ = inputs[0]
    total = sum(_taps(args[0], args[1], _three(stride), _three(padding), _three(dilation), groups) for args in inputs)
    assert isinstance(total, torch.Tensor)
    return [total if bias is None else total + bias.double().view(-1, 1, 1, 1)] * len(inputs)


def _three(option: Any) -> tuple[int, ...]:
    return (option,) * 3 if isinstance(option, int) else tuple(option)


def _taps(
    video: torch.Tensor,
    weight: torch.Tensor,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> torch.Tensor:
    """One rank's convolution, [B, O, T', Y', X']."""
    padded = F.pad(video.double(), [side for p in reversed(padding) for side in (p, p)])
    axes = zip(padded.shape[2:], dilation, weight.shape[2:], stride, strict=True)
    extents = [(n - d * (k - 1) - 1) // s + 1 for n, d, k, s in axes]
    kernels = weight.double().reshape(groups, -1, *weight.shape[1:])
    total = padded.new_zeros(len(video), groups, kernels.shape[1], *extents)
    for tap in torch.cartesian_prod(*(torch.arange(k, device="cpu") for k in weight.shape[2:])).tolist():
        window = padded
        for axis, (k, d, s, n) in enumerate(zip(tap, dilation, stride, extents, strict=True), start=2):
            window = window.narrow(axis, k * d, (n - 1) * s + 1)
        window = window[:, :, :: stride[0], :: stride[1], :: stride[2]].reshape(len(video), groups, -1, *extents)
        total += torch.einsum("bgityx,goi->bgotyx", window, kernels[..., *tap])
    return total.reshape(len(video), -1, *extents)


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Stride 1, no padding: the local convolution; the sum of the output over ranks, or all ranks' arguments to all others."""
    taps, channels = size["k"] ** 3, size["I"]
    video = size["B"] * size["T"] * size["Y"] * size["X"]
    out = size["B"] * size["O"]
    for axis in "TYX":
        out *= size[axis] - size["k"] + 1
    arguments, others = video * channels + size["O"] * channels * taps, world_size - 1
    return Cost(
        wire_bytes=others * min(2 / world_size * out, arguments) * itemsize,
        memory_bytes=(arguments + out) * itemsize,
        flops=2 * out * channels * taps,
    )


PROBLEM = Problem(
    number=76,
    slug="opensora_conv3d_allreduce",
    version=1,
    title="Convolve videos whose channels are spread over ranks, sum over ranks and add a bias once.",
    family="gemm-collective",
    parallelism="TP",
    collectives=("all_reduce",),
    origin="Open-Sora VAE",
    split="validation",
    sizes={
        "tiny": Size("tiny", {"B": 2, "I": 4, "O": 6, "T": 5, "Y": 7, "X": 9, "k": 3}),
        "default": Size("default", {"B": 1, "I": 32, "O": 32, "T": 9, "Y": 26, "X": 26, "k": 3}),
        "odd": Size("odd", {"B": 2, "I": 14, "O": 26, "T": 7, "Y": 17, "X": 13, "k": 3}),
        # Inputs of 1.4 GB and outputs of 10 GB in fp32 on a rank.
        "large": Size("large", {"B": 1, "I": 64, "O": 512, "T": 19, "Y": 514, "X": 514, "k": 3}),
        "upstream": Size("upstream", {"B": 1, "I": 128, "O": 512, "T": 19, "Y": 66, "X": 66, "k": 3}),
    },
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
