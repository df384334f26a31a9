"""`utils.cuda_helpers` of the public benchmark, so that its solution files can be imported unchanged.

Not here: the build (`compile`).  On ranks without CUDA it is refused with what to use instead.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from .compile import load_inline


def compile_cuda_extension(
    name: str,
    cuda_src: str,
    extra_cuda_cflags: list[str] | None = None,
    extra_include_paths: list[str] | None = None,
    extra_ldflags: list[str] | None = None,
) -> Any:
    """Build a CUDA source that binds its own functions and return the module.

    Raises:
        CompileError: with the compiler's log; or this rank has no CUDA.
    """
    return load_inline(
        name, "", cuda_src,
        extra_cuda_cflags=["-O3", *(extra_cuda_cflags or ())],
        extra_include_paths=extra_include_paths,
        extra_ldflags=extra_ldflags,
    )  # fmt: skip


def install() -> None:
    """Make `from utils.cuda_helpers import compile_cuda_extension` work."""
    package = ModuleType("utils")
    package.__path__ = []
    package.cuda_helpers = sys.modules[__name__]  # type: ignore[attr-defined]
    sys.modules["utils"], sys.modules["utils.cuda_helpers"] = package, sys.modules[__name__]
