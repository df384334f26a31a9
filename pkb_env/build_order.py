"""What a box may ask the broker to build, read from a request that may hold anything.

Not here: building (`broker`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pkb_env import cuda_toolchain, toolchain, triton_toolchain
from pkb_env.compiler_flags import FlagError, check_cuda_flags, check_flags, check_ptxas_flags
from pkb_env.native_text import findings_in
from pkb_env.submission import MAX_SOURCE_BYTES
from pkb_env.torch_extension import bind_functions

KINDS = ("cpp", "extension", "cuda", "cuda_extension", *triton_toolchain.SOURCE_NAMES)
_MOST_PTX = 4 << 20
"""Characters; a kernel that is unrolled much is long, and the assembler reads nothing else."""


@dataclass(frozen=True)
class Order:
    """A build, checked."""

    kind: str
    source: str
    flags: tuple[str, ...]
    name: str = ""
    """Module name of an extension."""

    @property
    def is_cuda(self) -> bool:
        return self.kind.startswith("cuda")

    @property
    def is_triton(self) -> bool:
        return self.kind in triton_toolchain.SOURCE_NAMES

    @property
    def is_extension(self) -> bool:
        return self.kind.endswith("extension")

    @property
    def file_name(self) -> str:
        return _file_name(self.kind)

    @classmethod
    def of(cls, request: Any) -> Order:
        """Read a request; the box may have sent anything.

        Raises:
            FlagError: it is no request, or asks for what is not allowed.
        """
        kind = request.get("kind") if isinstance(request, dict) else None
        if kind not in KINDS:
            raise FlagError(f"a build request must be of kind {', '.join(KINDS)}, not {str(request)[:80]!r}")
        flags = _flags(request)
        if kind in ("cpp", "cuda", "ptx", "launcher"):
            return cls(kind, _permitted(_texts([request.get("source")], "source")[0], kind), flags)
        functions = request.get("functions")
        if functions is not None and not (isinstance(functions, dict) and all(isinstance(v, str) for v in functions.values())):
            raise FlagError(f"functions must map names to docstrings, not {str(functions)[:80]!r}")
        sources = _texts(request.get("cpp_sources"), "cpp_sources")
        if kind == "cuda_extension":
            sources = [text for text in (*sources, *_texts(request.get("cuda_sources"), "cuda_sources")) if text]
        return cls(kind, _permitted(bind_functions(sources, functions), kind), flags, str(request.get("name")))


def _flags(request: dict[str, Any]) -> tuple[str, ...]:
    """Flags for the compiler that gets them; of a CUDA extension's flags for the host, nvcc has its own -O and -std."""
    flags = _texts(request.get("flags"), "flags")
    if request["kind"] in ("cuda", "ptx"):
        return (check_cuda_flags if request["kind"] == "cuda" else check_ptxas_flags)(flags)
    if request["kind"] != "cuda_extension":
        return check_flags(flags)
    host = [f"-Xcompiler={flag}" for flag in check_flags(flags) if not flag.startswith(("-O", "-std"))]
    return check_cuda_flags([*host, *_texts(request.get("cuda_flags"), "cuda_flags")])


def _file_name(kind: str) -> str:
    usual = cuda_toolchain.SOURCE_NAME if kind.startswith("cuda") else toolchain.SOURCE_NAME
    return triton_toolchain.SOURCE_NAMES.get(kind, usual)


def _texts(value: Any, what: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise FlagError(f"{what} must be text, not {str(value)[:80]!r}")
    return value


def _permitted(source: str, kind: str) -> str:
    """The source, unless the screen forbids what is in it; here it also sees what was put together at run time."""
    most = _MOST_PTX if kind == "ptx" else MAX_SOURCE_BYTES
    if len(source) > most:
        raise FlagError(f"a source of {len(source)} characters; at most {most} are compiled")
    for finding in findings_in(source) if kind != "ptx" else ():
        if finding.severity == "forbid":
            raise FlagError(f"{_file_name(kind)}:{finding.line}: {finding.message}")
    return source
