"""A two-layer perceptron and its squared error, gradients and flat parameters: what references call.

Parameters are W1 [H, I], b1 [H], W2 [O, H], b2 [O], in this order.

Not here: inputs and truth (`problems.training`), optimizers (`problems.adam`), communication.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def mlp_gradients(x: torch.Tensor, y: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of the mean of (relu(x W1^T + b1) W2^T + b2 - y)^2 over all elements, x [N, I], y [N, O], by the four parameters."""
    w1, b1, w2, b2 = parameters
    hidden = F.linear(x, w1, b1).relu_()
    delta = (F.linear(hidden, w2, b2) - y).mul_(2 / y.numel())
    delta_hidden = (delta @ w2).masked_fill_(hidden <= 0, 0)
    return [delta_hidden.T @ x, delta_hidden.sum(0), delta.T @ hidden, delta.sum(0)]


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements one after another, in new memory."""
    return torch.cat([x.flatten() for x in tensors])


def unflattened(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of a flat tensor in the shapes of `like`."""
    return [part.view(x.shape) for part, x in zip(torch.split(flat, [x.numel() for x in like]), like, strict=True)]
