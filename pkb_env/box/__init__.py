"""All that a box may see: copied there and imported as `pkb_box`.  Imports nothing else of ours.

For candidates: `compile_cpp`, `compile_cuda`, `symm_mem`, `new_output`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["compile_cpp", "compile_cuda", "new_output", "symm_mem"]


def __getattr__(name: str) -> Any:
    if name in ("compile_cpp", "compile_cuda"):
        from . import compile as compilers  # noqa: PLC0415  candidates that need no compiler do not pay for it

        return getattr(compilers, name)
    if name == "new_output":
        from .worker import new_output  # noqa: PLC0415

        return new_output
    if name == "symm_mem":
        from importlib import import_module  # noqa: PLC0415

        return import_module(".symm_mem", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
