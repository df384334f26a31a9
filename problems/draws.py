"""What several problems' `make_inputs` do: take turns, cut an axis raggedly, spread magnitudes.

Not here: anything that a reference or `exact` calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from problems.base import Draw


def turn(draw: Draw, kinds: int, name: str = "turn") -> int:
    """One of `kinds`, equal on every rank, the next one in the next trial, from a secret start."""
    start = torch.randint(kinds, (), generator=replace(draw, trial=0).shared(name))
    return (int(start) + draw.trial) % kinds


def ragged(total: int, parts: int, generator: torch.Generator, least: int = 0) -> list[int]:
    """Uneven parts of at least `least` that add up to `total`; the larger ones about four times the smaller ones."""
    weights = torch.rand(parts, generator=generator).add_(1 / 3).double().cumsum(0)
    ends = (weights / weights[-1] * (total - least * parts)).round().long().tolist()
    return [least + end - start for start, end in zip([0, *ends], ends, strict=False)]


def normal_rows(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Normal values; every row (last axis) has a binary exponent of its own, so that a row in the wrong place is seen."""
    exponent = torch.randint(-6, 7, (*shape[:-1], 1), generator=generator).float()
    return torch.randn(tuple(shape), generator=generator).mul_(exponent.exp2_())
