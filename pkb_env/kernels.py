"""What ran on the GPUs, as the ranks told it, and which of it is the candidate's own.

Not here: the call under the profiler (`box.profiled`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from pkb_env.told import clean
from rewards.verdict import Kernel

_LIBRARY = re.compile(
    r"^(?:void )?(?:at::|c10d?::|nccl|cub::|thrust::|cublas|cudnn|cutlass|gemv|gemm|splitK|nvjet|magma|"
    r"(?:sm|ampere|hopper|turing|volta)\w*_(?:xmma|gemm|\w*gemm)|Mem(?:cpy|set) )", re.IGNORECASE,
)  # fmt: skip
"""How the kernels of torch and NVIDIA's libraries, and copies, begin."""
_MOST = 16
_NAME_CHARS = 160


def read(told: Sequence[Any]) -> tuple[Kernel, ...]:
    """The longest kernels of the rank on which they took longest in all, longest first; whatever a rank told is tidied up.

    Args:
        told: per rank the JSON text of `box.profiled.kernels`, or anything.
    """
    ranks = [_rows(text) for text in told]
    slowest = max(ranks, key=lambda rows: sum(kernel.ms for kernel in rows), default=[])
    return tuple(sorted(slowest, key=lambda kernel: -kernel.ms)[:_MOST])


def own_share(kernels: Sequence[Kernel]) -> float | None:
    """Share of the kernels' time that is in kernels of the candidate's own; None where nothing ran."""
    whole = sum(kernel.ms for kernel in kernels)
    return sum(kernel.ms for kernel in kernels if kernel.own) / whole if whole else None


def _rows(text: Any) -> list[Kernel]:
    try:
        rows = json.loads(text) if isinstance(text, str) else []
    except (ValueError, RecursionError):
        return []
    return [kernel for row in rows if (kernel := _kernel(row)) is not None] if isinstance(rows, list) else []


def _kernel(row: Any) -> Kernel | None:
    if not isinstance(row, list) or len(row) != 3 or type(row[1]) is not int or not isinstance(row[2], int | float):
        return None
    name = clean(row[0], _NAME_CHARS)
    good = name and 0 < row[1] < 1 << 40 and 0 < row[2] < 1e12
    return Kernel(name, row[1], row[2] / 1e3, own=not _LIBRARY.match(name)) if good else None
