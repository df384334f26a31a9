"""The global view of a mixture-of-experts layer in float64: owner by owner, all tokens that have any expert there.

Not here: anything that a reference calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Weight and bias of gate, up and down, in float64."""


def shares(args: tuple[Any, ...], top_k: int) -> torch.Tensor:
    """Of every expert in every token of a rank, [T, E]: its probability if that is among the `top_k` largest, else 0.

    Args:
        args: hidden states, weight and bias of the router, and more.
        top_k: experts of a token.
    """
    hidden, weight, bias = args[:3]
    logits = torch.einsum("...n,en->...e", hidden.double(), weight.double()).flatten(0, -2)
    if bias is not None:
        logits = logits + bias.double()
    odds = torch.exp(logits - logits.amax(1, keepdim=True))
    least = odds.sort(dim=1, descending=True).values[:, top_k - 1 : top_k]
    return torch.where(odds >= least, odds / odds.sum(1, keepdim=True), 0)


def outputs(inputs: Sequence[tuple[Any, ...]], layers: Sequence[Layers], top_k: int, span: int) -> list[torch.Tensor]:
    """Of all ranks, [T, N] each.

    Args:
        inputs: of all ranks; hidden states, weight and bias of the router, and more.
        layers: what each rank's experts are.
        top_k: experts of a token.
        span: how many ranks in a row share one set of experts.
    """
    found = []
    for rank, args in enumerate(inputs):
        tokens = args[0].double().flatten(0, -2)
        homes = shares(args, top_k).view(len(tokens), span, -1).sum(2)
        out = torch.zeros_like(tokens)
        for owner, share in enumerate(homes.unbind(1)):
            ids = torch.where(share > 0)[0]
            out[ids] += share[ids, None] * said(tokens[ids], layers[rank // span * span + owner])
        found.append(out)
    return found


def said(x: torch.Tensor, layers: Layers) -> torch.Tensor:
    """What an expert says of tokens [any, N]."""
    gate, up, down = layers
    inner = torch.addmm(gate[1], x, gate[0].T)
    inner *= torch.sigmoid(inner) * torch.addmm(up[1], x, up[0].T)
    return torch.addmm(down[1], inner, down[0].T)


def doubled(args: tuple[Any, ...]) -> Layers:
    """The three layers among a rank's arguments."""
    return [(weight.double(), bias.double()) for weight, bias in args[3:6]]
