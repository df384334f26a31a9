"""Rounding to float8_e4m3fn with delayed scaling, in float32: what references call.

Not here: inputs and truth (`problems.fp8_cases`), who sends what.
"""

from __future__ import annotations

import torch

LARGEST = 448.0
"""The largest value of the format."""


def fp8_round_trip(x: torch.Tensor, amax_history: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values as they come back from fp8, in the dtype of x, and the history with the largest |x| as its newest entry."""
    wide = x.float()
    history = amax_history.roll(-1)
    history[-1] = torch.linalg.vector_norm(wide, float("inf"))
    scale = history.amax().float().clamp(min=1e-12) / LARGEST
    codes = (wide / scale).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(x.dtype), history
