"""The recipe of CUDA: which nvcc, which architecture, which command line.

Two kinds of sources, host and device code in one file: `cuda` (plain C ABI, native/pkb_cuda.h included, a few seconds) and
`cuda_extension` (includes torch/extension.h as torch.utils.cpp_extension.load_inline does; one to two minutes).

Nothing is built beforehand, and no CUDA context is made: the architecture is asked of nvidia-smi.
Not here: running a candidate's build (the broker does, in a sandbox), caching its result, C++ (`toolchain`).
"""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pkb_env import torch_extension
from pkb_env.compiler_flags import FlagError, check_cuda_flags
from pkb_env.compiler_folders import compiler_folders, nvcc_folders, run, without_folders
from pkb_env.toolchain import NoCompiler, Toolchain, content_key

SOURCE_NAME = "candidate.cu"
"""Name of the file a source is written to, as logs show it."""

_NATIVE = Path(__file__).parent / "box" / "native"
_HEADER, _SMALL_HEADER = "pkb_cuda.h", "torch_extension.h"
_BASE = ("--shared", "-Xcompiler", "-fPIC")
_USUAL = "sm_90a"
"""Built for where there is no device."""
_PACKAGES = "nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl nvidia-nvvm"


class NoCudaCompiler(NoCompiler):
    """This machine cannot build what was asked for: no nvcc, or a torch without CUDA."""


@dataclass(frozen=True)
class CudaToolchain:
    """An nvcc of this machine, the C++ compiler it calls, and the architecture it builds for."""

    nvcc: str
    host: Toolchain
    release: str
    """`13.0.88`."""
    architecture: str
    """`sm_90a`."""

    @classmethod
    def detect(cls) -> CudaToolchain:
        """The nvcc of `$CUDA_HOME`, of PATH, of /usr/local/cuda, or of the packages that pip installs.

        Raises:
            NoCudaCompiler: none of them runs.
            NoCompiler: there is no C++ compiler for the host's part.
        """
        for name in _places():
            path = shutil.which(name)
            root = nvcc_folders(path)[:1] if path else ()
            answer = run([str(path), "--version"]).stdout if root else ""
            if release := re.search(r"\bV(\d+\.\d+\.\d+)", answer):
                return cls(str(root[0] / "bin" / "nvcc"), Toolchain.detect(), release[1], device_architecture() or _USUAL)
        wanted = ", ".join(f"'{name}==13.0.*'" for name in _PACKAGES.split())
        raise NoCudaCompiler(f"no nvcc in $CUDA_HOME/bin, PATH or /usr/local/cuda/bin; set CUDA_HOME, or pip install {wanted}")

    @property
    def version(self) -> str:
        """Its name in records."""
        return f"nvcc {self.release} for {self.architecture}"

    @property
    def identity(self) -> str:
        """Content key of what a build depends on besides its source: compilers, architecture, our headers, our recipe."""
        files = (Path(__file__), _NATIVE / _HEADER, _NATIVE / _SMALL_HEADER)
        return content_key(self.version, self.host.version, *(file.read_text(encoding="utf-8") for file in files))

    @property
    def folders(self) -> tuple[Path, ...]:
        """What a build reads and runs: the toolkit, the C++ compiler, our headers."""
        return (*nvcc_folders(self.nvcc), *compiler_folders(self.host.compiler), _NATIVE)

    def command(self, source: Path, output: Path, flags: Sequence[str] = ()) -> list[str]:
        """The command line that builds a source with a plain C ABI; needs `folders` and the system's headers, writes `output`.

        Raises:
            FlagError: see `check_cuda_flags`.
        """
        rest = ["-include", str(_NATIVE / _HEADER), *self._libraries(), "-o", str(output), str(source)]
        return [self.nvcc, "-ccbin", self.host.compiler, *_BASE, *self._settings(flags), *rest]

    def prepare_extensions(self) -> None:
        """Check that there is something to build against; nvcc takes no precompiled header.

        Raises:
            NoCudaCompiler: this torch was built without CUDA.
        """
        if not torch_extension.cuda_libraries():
            torch = torch_extension.torch_version()
            raise NoCudaCompiler(f"torch {torch} is built without CUDA: nothing over torch/extension.h can use a GPU")

    def extension_command(self, source: Path, output: Path, name: str, flags: Sequence[str] = ()) -> list[str]:
        """The command line that builds a Python module over torch's C++ interface, host and device code in one file.

        Where the source allows it, a small torch/extension.h is laid beside it and takes the place of torch's own.

        Raises:
            FlagError: see `check_cuda_flags`; or the name is no module name.
        """
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise FlagError(f"extension name {name!r} is not a plain module name")
        settings = self._settings(flags, "-std=c++20")
        headers = [*_small_torch(source), *torch_extension.includes(), *torch_extension.cuda_folders("include")]
        return [
            self.nvcc, "-ccbin", self.host.compiler, *_BASE, *settings, *torch_extension.CUDA_FLAGS, *torch_extension.macros(),
            f"-DTORCH_EXTENSION_NAME={name}", *(f"-isystem={folder}" for folder in headers), "-include", "torch/extension.h",
            "-w", "-o", str(output), str(source), *torch_extension.cuda_libraries(), *self._libraries(shared=True),
        ]  # fmt: skip

    def key(self, kind: str, source: str, flags: Sequence[str]) -> str:
        """SHA-256, hexadecimal, of everything that decides what a build gives."""
        torch = torch_extension.torch_version() if kind == "cuda_extension" else ""
        return content_key(self.identity, kind, torch, *flags, source)

    def readable(self, log: str, source: Path, limit: int = 6000) -> str:  # noqa: ARG002  the same call as for C++
        """The log of nvcc and its programs without paths and names of temporary files, cut to `limit` characters."""
        return without_folders(re.sub(r"\btmpxft_[0-9a-f]+_[0-9a-f]+-\d+_", "", log), limit)

    def _settings(self, flags: Sequence[str], standard: str = "-std=c++17") -> list[str]:
        """Level, standard and architecture, each once, then the other flags of the candidate."""
        own = check_cuda_flags(flags)
        number = self.architecture.removeprefix("sm_")
        defaults = {"-O": "-O3", "-std": standard, "-arch": f"-gencode=arch=compute_{number},code=sm_{number}"}
        given = {_group(flag): flag for flag in own}
        missing = [flag for group, flag in defaults.items() if group not in given]
        return [*missing, *(flag for flag in own if _group(flag) not in ("-O", "-std") or given[_group(flag)] is flag)]

    def _libraries(self, *, shared: bool = False) -> list[str]:
        """CUDA's runtime: its own copy of it, or the one that torch has loaded, whose last error torch's macros read."""
        root = Path(self.nvcc).parent.parent
        folders = [*(torch_extension.cuda_folders("lib") if shared else ()), root / "lib64", root / "lib"]
        paths = [f"-L{folder}" for folder in folders if folder.is_dir()]
        return [*paths, "-cudart=none", f"-Xlinker=-l:libcudart.so.{self.release.split('.')[0]}"] if shared else paths


def _group(flag: str) -> str:
    """Flags of one group replace each other."""
    plain = flag.replace("--", "-", 1) if flag.startswith("--") else flag
    if plain.startswith(("-arch=", "-gencode=")):
        return "-arch"
    return next((group for group in ("-O", "-std") if plain.startswith(group)), "")


def _small_torch(source: Path) -> list[Path]:
    """A folder with the small torch/extension.h, unless the source names what that leaves out."""
    if torch_extension.needs_everything(source.read_text(encoding="utf-8")):
        return []
    folder = source.parent / "headers"
    (folder / "torch").mkdir(parents=True, exist_ok=True)
    shutil.copy(_NATIVE / _SMALL_HEADER, folder / "torch" / "extension.h")
    return [folder]


def _places() -> Iterator[str]:
    if home := os.environ.get("CUDA_HOME"):
        yield f"{home}/bin/nvcc"
    yield from ("nvcc", "/usr/local/cuda/bin/nvcc")
    yield from (str(folder / "nvcc") for folder in torch_extension.cuda_folders("bin"))


@functools.cache
def device_architecture() -> str:
    """`sm_90a` for the first GPU that nvidia-smi names, with the instructions that only it has; empty when there is none."""
    tool = shutil.which("nvidia-smi")
    answer = run([tool, "--query-gpu=compute_cap", "--format=csv,noheader"]).stdout if tool else ""
    found = re.match(r"(\d+)\.(\d)\s*$", answer, re.MULTILINE)
    return f"sm_{found[1]}{found[2]}{'a' if int(found[1]) >= 9 else ''}" if found else ""
