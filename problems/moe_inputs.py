"""Inputs of a mixture-of-experts layer with a router, and the least that it costs.

Hardened: the router is equal on every rank and skewed, its logits are O(1), and no choice is so close that rounding could
turn it; experts differ; outputs are O(1).  Upstream: everything is each rank's own, and the logits are 30 times as large.
Not here: routing without a router (`routing`); anything that a reference or `exact` calls.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from problems.base import Cost, Draw, Size
from problems.draws import turn
from problems.moe import Layer
from problems.routing import popularity, tokens_of

GAP = 0.25
"""By how much at least the logits of a token's last chosen and first other expert differ."""
SHARPNESS = 1.5
"""Standard deviation of a logit without its bias."""
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Layer, Layer, Layer]


def top_ks(size: Size, experts: int) -> tuple[int, int]:
    """The numbers of experts of a token that take turns; fewer than there are where that is possible."""
    first, second = (max(1, min(k, experts - 1)) for k in (size["K"], max(1, size["K"] // 2)))
    return first, second


def layer_inputs(draw: Draw, size: Size, experts: int) -> tuple[Inputs, int]:
    """Arguments up to the three layers of the rank's experts, and top_k; where experts < W, rank r holds expert r % experts.

    Two and three axes, with and without a bias of the router, two numbers of experts per token take turns.
    """
    if draw.profile == "upstream":
        return upstream_inputs(draw, size, experts), min(2, experts)
    columns, top_k = size["N"], top_ks(size, experts)[turn(draw, 2, "top_k")]
    weight = torch.randn(experts, columns, generator=draw.shared("gate_weight")).mul_(SHARPNESS * columns**-0.5).to(draw.dtype)
    bias = popularity(draw, experts).to(draw.dtype)
    biased = turn(draw, 3, "bias") > 0
    tokens = torch.randn(tokens_of(draw, size["M"]), columns, generator=draw.own("hidden_states"))
    hidden = decided(tokens, weight.float(), bias.float() * biased, top_k).to(draw.dtype)
    layers = layers_of(replace(draw, rank=draw.rank % experts), size)
    return (hidden[None] if turn(draw, 2, "axes") else hidden, weight, bias if biased else None, *layers), top_k


def upstream_inputs(draw: Draw, size: Size, experts: int) -> Inputs:
    """Everything normal and each rank's own, also the router."""
    hidden = torch.randn(size["M"], size["N"], generator=draw.own("hidden_states")).to(draw.dtype)
    weight = torch.randn(experts, size["N"], generator=draw.own("gate_weight")).to(draw.dtype)
    return hidden, weight, torch.randn(experts, generator=draw.own("gate_bias")).to(draw.dtype), *layers_of(draw, size)


def decided(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, top_k: int) -> torch.Tensor:
    """The same tokens, moved a little so that logits of experts that are not chosen are lower by GAP."""
    logits = tokens @ weight.T + bias
    lower = torch.full_like(logits, -GAP).scatter_(1, logits.topk(top_k).indices, 0)
    return torch.addmm(tokens, lower, torch.linalg.pinv(weight).T)


def layers_of(draw: Draw, size: Size) -> tuple[Layer, Layer, Layer]:
    """The experts of a rank: gate, up and down."""
    inter, columns = size["I"], size["N"]
    return linear(draw, "gate", inter, columns), linear(draw, "up", inter, columns), linear(draw, "down", columns, inter)


def linear(draw: Draw, name: str, outputs: int, inputs: int) -> Layer:
    """Weight [outputs, inputs] and bias [outputs]: values of O(1) become values of O(1).  Upstream: torch's own default."""
    chance = draw.own(name)
    if draw.profile == "upstream":
        shapes, width = ((outputs, inputs), (outputs,)), 2 * inputs**-0.5
        weight, bias = (torch.rand(shape, generator=chance).sub_(0.5).mul_(width) for shape in shapes)
    else:
        gain = 3.0 if name == "down" else 1.5
        weight = torch.randn(outputs, inputs, generator=chance).mul_(gain * inputs**-0.5)
        bias = torch.randn(outputs, generator=chance).mul_(0.5)
    return weight.to(draw.dtype), bias.to(draw.dtype)


def layer_cost(size: Size, experts: int, span: int, itemsize: int, more: int = 0) -> Cost:
    """The least of an average rank: either tokens travel, once to each of their ranks and back, or the experts' weights do.

    Args:
        size: extents.
        experts: in all.
        span: ranks over which they are spread.
        itemsize: bytes of an element.
        more: elements of a rank's weights besides those of its three layers.
    """
    homes = -(-min(top_ks(size, experts)) * span // experts)
    once, weights = size["M"] * size["N"], 3 * size["N"] * size["I"] + more
    return Cost(
        wire_bytes=(span - 1) * min(2 * homes * once / span, weights) * itemsize,
        memory_bytes=(2 * once + weights + experts * size["N"]) * itemsize,
        flops=2 * experts * once + 2 * homes * size["M"] * weights,
    )
