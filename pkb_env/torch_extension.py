"""What a build over torch's C++ interface needs besides a compiler: bindings, headers, macros, libraries.

Imports torch only when asked: plain sources need none of this.
Not here: the command line (`toolchain`).
"""

from __future__ import annotations

import importlib.util
import re
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from pkb_env.compiler_flags import FlagError

CUDA_FLAGS = (
    "-D__CUDA_NO_HALF_OPERATORS__", "-D__CUDA_NO_HALF_CONVERSIONS__", "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__", "--expt-relaxed-constexpr",
)  # fmt: skip
"""What torch gives nvcc for every extension."""
LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")
_NEEDS_EVERYTHING = re.compile(r"\b(nn|optim|data|jit|serialize|nested|sparse|mps|xpu)\s*::|torch::(save|load|print|python)\b")


def bind_functions(cpp_sources: Sequence[str], functions: Mapping[str, str] | None) -> str:
    """One source from several, with a binding for every name in `functions` (name -> docstring), as load_inline makes it.

    Raises:
        FlagError: a name that is no C++ name.
    """
    text = "\n".join(cpp_sources)
    if functions is None:
        return text
    strange = [name for name in functions if not re.fullmatch(r"[A-Za-z_]\w*(::[A-Za-z_]\w*)*", name)]
    if strange:
        raise FlagError(f"functions {strange}: not the name of a C++ function")
    lines = [f'  m.def("{n}", torch::wrap_pybind_function({n}), {_literal(doc)});' for n, doc in functions.items()]
    return "\n".join([text, "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {", *lines, "}", ""])


def _literal(text: str) -> str:
    """A C++ string literal; octal escapes end after three digits, hexadecimal ones would not."""
    plain = (chr(b) if 32 <= b < 127 and chr(b) not in '"\\?' else f"\\{b:03o}" for b in text.encode("utf-8", "replace"))
    return '"' + "".join(plain) + '"'


def needs_everything(source: str) -> bool:
    """Whether a source names a part of torch that the small header leaves out."""
    return _NEEDS_EVERYTHING.search(source) is not None


def includes() -> tuple[Path, ...]:
    """Header folders of torch and Python; a box for extensions must be able to read them."""
    include = torch_folder() / "include"
    return (include, include / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include")))


def torch_folder() -> Path:
    """Where torch is installed."""
    import torch  # noqa: PLC0415

    return Path(torch.__file__).parent


def torch_version() -> str:
    """Part of the key of every extension: its binary fits this torch only."""
    import torch  # noqa: PLC0415

    return str(torch.__version__)


def cuda_libraries() -> tuple[str, ...]:
    """What a CUDA extension is linked with; empty when this torch was built without CUDA."""
    folder = torch_folder() / "lib"
    return (f"-L{folder}", *LIBRARIES, "-lc10_cuda", "-ltorch_cuda") if (folder / "libtorch_cuda.so").exists() else ()


def cuda_folders(name: str) -> tuple[Path, ...]:
    """Folders `bin`, `include` or `lib` of the CUDA packages beside torch: `nvidia/cu13/NAME`, or `nvidia/PACKAGE/NAME`."""
    spec = importlib.util.find_spec("nvidia")
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    return tuple(sorted(folder for place in places for folder in place.glob(f"*/{name}") if folder.is_dir()))


def macros() -> tuple[str, ...]:
    """What an extension must share with torch: the standard library's ABI and, for older versions, pybind11's marks."""
    import torch  # noqa: PLC0415

    found = ["-DTORCH_API_INCLUDE_EXTENSION_H", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):
        value = getattr(torch._C, f"_PYBIND11_{name}", None)  # noqa: SLF001  torch offers them only there
        if value is not None:
            found.append(f'-DPYBIND11_{name}="{value}"')
    return tuple(found)
