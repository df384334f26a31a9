"""Clipping gradients by their norm over all ranks: what references call.

Not here: inputs and truth (`problems.clipping_cases`), which ranks' sums are added.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def power_sum(grads: Sequence[torch.Tensor | None], norm_type: float) -> torch.Tensor:
    """Sum of |g|^p over all elements that are there, a scalar in at least float32; zero when nothing is."""
    total = torch.zeros((), device=next((g.device for g in grads if g is not None), None))
    for grad in grads:
        if grad is not None:
            wide = torch.promote_types(grad.dtype, torch.float32)
            total = total + grad.to(wide).abs().pow_(norm_type).sum()
    return total


def clip(grads: Sequence[torch.Tensor | None], total: torch.Tensor, max_norm: float) -> None:
    """Scale gradients in place so that a total norm above `max_norm` becomes `max_norm`; a smaller one stays."""
    if total > max_norm:
        for grad in grads:
            if grad is not None:
                grad.mul_(max_norm / total)
