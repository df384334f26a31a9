"""Compilers for a box that cannot start one: sources go out through a request, the path of a library comes back.

`compile_cpp` and `compile_cuda` are the fast ways (plain C ABI, 0.2 to 0.5 s and a few seconds);
`torch.utils.cpp_extension.load_inline` answers too, but takes many times longer.  Equal sources are built once: here per
process, outside per machine.

Not here: how a library is built, which flags are allowed (the broker outside).
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Request = Callable[[dict[str, Any]], dict[str, Any]]

_EXTENSION, _TRITON = "torch.utils.cpp_extension", "triton"
_HARMLESS_LIBRARIES = frozenset({"-lm", "-lpthread", "-pthread", "-ldl", "-lrt"})
_request: Request | None = None
_built: dict[tuple[Any, ...], str] = {}


class CompileError(RuntimeError):
    """A source could not be built.

    Attributes:
        log: what the compiler printed, or why it was not asked.
        reason: `compiler`, `flags`, `deadline`, `unsupported`, or what the broker says.
    """

    def __init__(self, log: str, reason: str = "compiler") -> None:
        super().__init__(f"{reason}: {log}")
        self.log, self.reason = log, reason


def connect(request: Request) -> None:
    """Send build requests through this function.

    A request is `{"kind": "cpp" or "cuda", "source", "flags"}` or `{"kind": "extension", "name", "cpp_sources", "functions",
    "flags"}`, of kind `cuda_extension` with `cuda_sources` and `cuda_flags`; the answer `{"path"}`, or `{"error": log,
    "reason"}`.  Triton's requests are of kind `ptx` and `launcher`; `{"kind": "triton"}` asks which assemblers there are.
    """
    global _request  # noqa: PLW0603  one broker per process
    _request = request


def compile_cpp(source: str, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Build C++ (C++20, -O3 -march=native, `pkb.h` and the usual std headers already included) and load it.

    Functions need `extern "C"`.  Set their `argtypes`: ctypes cuts an address to 32 bits otherwise.

    Raises:
        CompileError: with the compiler's log.
    """
    body = {"kind": "cpp", "source": source, "flags": list(flags)}
    return ctypes.CDLL(build(body, ("cpp", source, *flags)))


def compile_cuda(source: str, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Build CUDA, host and device code in one file, and load it.

    nvcc for this GPU, C++17, -O3; `pkb_cuda.h` with the runtime, bf16 and half is already included.  Functions need
    `extern "C"`; launch kernels on the stream that is handed in, `torch.cuda.current_stream().cuda_stream`.  Set their
    `argtypes`: ctypes cuts an address to 32 bits otherwise.

    Raises:
        CompileError: with the compiler's log; or this rank has no CUDA.
    """
    _require_cuda("compile_cuda")
    body = {"kind": "cuda", "source": source, "flags": list(flags)}
    return ctypes.CDLL(build(body, ("cuda", source, *flags)))


def build(body: dict[str, Any], key: tuple[Any, ...]) -> str:
    """Path of what the broker makes of a request; asked once per key.

    Raises:
        CompileError: with the compiler's log, or why it was not asked.
    """
    if key not in _built:
        if _request is None:
            raise CompileError("this process is connected to no compiler: compile inside a box", "unsupported")
        answer = _request(body)
        if "path" not in answer:
            raise CompileError(str(answer.get("error", "no log")), str(answer.get("reason", "compiler")))
        _built[key] = str(answer["path"])
    return _built[key]


def load_inline(
    name: str,
    cpp_sources: str | Sequence[str] = "",
    cuda_sources: str | Sequence[str] | None = None,
    sycl_sources: str | Sequence[str] | None = None,
    functions: str | Sequence[str] | Mapping[str, str] | None = None,
    extra_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_sycl_cflags: Sequence[str] | None = None,  # noqa: ARG001
    extra_ldflags: Sequence[str] | None = None,
    extra_include_paths: Sequence[str] | None = None,
    is_python_module: bool = True,
    **_building: Any,
) -> Any:
    """What torch's function of this name does, through the broker.  Where and how to build is not for the caller to say.

    Raises:
        CompileError: the compiler's log, or what cannot be built here.
    """
    _refuse_paths(extra_include_paths, extra_ldflags)
    body: dict[str, Any] = {
        "kind": "extension", "name": name, "cpp_sources": _listed(cpp_sources), "functions": _documented(functions),
        "flags": _listed(extra_cflags),
    }  # fmt: skip
    if sycl_sources:
        raise CompileError("sycl_sources: there is no SYCL compiler", "unsupported")
    if cuda_sources:
        _require_cuda("cuda_sources")
        body |= {"kind": "cuda_extension", "cuda_sources": _listed(cuda_sources), "cuda_flags": _listed(extra_cuda_cflags)}
    path = build(body, (repr(body),))
    return import_extension(name, path) if is_python_module else _load_operators(path)


def _listed(given: str | Sequence[str] | None) -> list[str]:
    return [given] if isinstance(given, str) else list(given or ())


def _require_cuda(what: str) -> None:
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        raise CompileError(
            f"{what}: this rank lives on the CPU and sees no CUDA device; write the kernel in C++ and build it with "
            "pkb_box.compile_cpp, or with load_inline(cpp_sources=...)",
            "unsupported",
        )


def _refuse_paths(include_paths: Sequence[str] | None, ldflags: Sequence[str] | None) -> None:
    strange = [*(include_paths or ()), *(f for f in ldflags or () if f not in _HARMLESS_LIBRARIES)]
    if strange:
        raise CompileError(f"{strange}: own include paths and libraries cannot be used in a box", "unsupported")


def _documented(functions: str | Sequence[str] | Mapping[str, str] | None) -> dict[str, str] | None:
    """Function names and their docstrings; None when the source binds its functions itself."""
    if functions is None:
        return None
    if isinstance(functions, str):
        functions = [functions]
    return dict(functions) if isinstance(functions, Mapping) else {f: f for f in functions}


def import_extension(name: str, path: str) -> ModuleType:
    """Load a built Python module."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CompileError(f"the broker's answer {path!r} is no extension module", "broker")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _load_operators(path: str) -> str:
    import torch  # noqa: PLC0415

    torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    return path


def load(*_arguments: Any, **_settings: Any) -> Any:
    """Refuse: `load` builds files, and a box has none.  Raises CompileError."""
    raise CompileError("load() builds files, a box has none: pass the source itself to load_inline or compile_cpp", "unsupported")


def _redirect(module: ModuleType) -> None:
    if module.__name__ == _TRITON:
        from . import triton_tools  # noqa: PLC0415  imports this module

        triton_tools.install(_request({"kind": _TRITON}).get("versions", {}) if _request else {})
    else:
        module.load_inline, module.load = load_inline, load  # type: ignore[attr-defined]


class _Redirecting(importlib.abc.Loader):
    """Executes a module as its own loader does, then redirects what it builds with."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _redirect(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Redirects a module when a candidate imports it: importing it beforehand would cost every rank some tenths of a second."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in (_EXTENSION, _TRITON):
            return None
        others = [f for f in sys.meta_path if f is not self]
        spec = next((s for f in others if (s := f.find_spec(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Redirecting(spec.loader)
        return spec


def install() -> None:
    """Let torch's extensions and Triton build through the broker, and `utils.cuda_helpers` be the shim of this package."""
    from . import cuda_helpers  # noqa: PLC0415  imports this module

    cuda_helpers.install()
    for name in (_EXTENSION, _TRITON):
        if name in sys.modules:
            _redirect(sys.modules[name])
    if not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
