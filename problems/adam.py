"""Adam without weight decay, in the dtype of its tensors: what references call.

Not here: inputs and truth (`problems.training`), gradients (`problems.mlp`), who owns which slice.
"""

from __future__ import annotations

import torch


def adam(
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    parameter: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parameter and both moments after step `step` >= 1, in new memory; moments keep the tensors' dtype."""
    assert step >= 1
    exp_avg = (exp_avg * beta1).add_(grad, alpha=1 - beta1)
    exp_avg_sq = (exp_avg_sq * beta2).addcmul_(grad, grad, value=1 - beta2)
    root = (exp_avg_sq / (1 - beta2**step)).sqrt_().add_(eps)
    update = (exp_avg / (1 - beta1**step)).div_(root)
    return parameter.add(update, alpha=-lr), exp_avg, exp_avg_sq
