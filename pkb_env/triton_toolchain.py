"""The recipe of Triton: what it starts programs for, the assembler for a kernel and a C compiler for what launches it.

Triton turns a kernel into PTX inside the candidate's process.  Two kinds of sources are left: `ptx`, which becomes a cubin,
and `launcher`, a Python module in C that calls the driver.  The assemblers and the driver's headers are Triton's own.
Not here: running a candidate's build (the broker does, in a sandbox), caching its result, asking for it (`box.triton_tools`).
"""

from __future__ import annotations

import importlib.util
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pkb_env.compiler_flags import check_ptxas_flags
from pkb_env.compiler_folders import compiler_folders, run, without_folders
from pkb_env.toolchain import NoCompiler, Toolchain, content_key

_PTX, _LAUNCHER = "kernel.ptx", "launcher.c"
SOURCE_NAMES = {"ptx": _PTX, "launcher": _LAUNCHER}
"""Kind of a source -> name of the file it is written to, as logs show it."""
_BLACKWELL = 100
"""Architectures from here on have an assembler of their own."""


class NoTriton(NoCompiler):
    """This machine cannot build what Triton asks for."""


@dataclass(frozen=True)
class TritonToolchain:
    """Triton's assemblers and headers, and the compiler that takes C."""

    folder: Path
    """Triton's part for NVIDIA, with `bin` and `include`."""
    host: Toolchain
    release: str
    """`3.6.0`."""
    assemblers: tuple[tuple[str, str], ...]
    """Name, and all that it prints for `--version`."""
    python: Path
    """Python's headers."""

    @classmethod
    def detect(cls) -> TritonToolchain:
        """The Triton that `import triton` finds.

        Raises:
            NoTriton: there is none, it is too old, its assembler does not run, or Python's headers are missing.
            NoCompiler: there is no compiler for C.
        """
        spec = importlib.util.find_spec("triton")
        package = Path((spec.submodule_search_locations or [""])[0]) if spec else Path()
        if not (package / "knobs.py").is_file():
            raise NoTriton("there is no Triton 3.4 or later: pip install triton, or a torch that is built with CUDA")
        folder = package / "backends" / "nvidia"
        found = {path.name: run([str(path), "--version"]).stdout for path in sorted((folder / "bin").glob("ptxas*"))}
        if not found.get("ptxas"):
            raise NoTriton(f"the assembler of Triton does not run: {folder / 'bin' / 'ptxas'}")
        return cls(folder, Toolchain.detect(), metadata.version("triton"), tuple(found.items()), _python_headers())

    @property
    def version(self) -> str:
        """Its name in records."""
        return f"triton {self.release}"

    @property
    def identity(self) -> str:
        """Content key of what a build depends on besides its source: Triton, its assemblers, compiler, Python, our recipe."""
        texts = [text for pair in self.assemblers for text in pair]
        soabi = str(sysconfig.get_config_var("SOABI"))
        return content_key(self.release, self.host.version, soabi, Path(__file__).read_text(encoding="utf-8"), *texts)

    @property
    def folders(self) -> tuple[Path, ...]:
        """What a build reads and runs."""
        return (self.folder / "bin", self.folder / "include", self.python, *compiler_folders(self.host.compiler))

    def command(self, source: Path, output: Path, flags: Sequence[str] = ()) -> list[str]:
        """The command line that builds a source of either kind, told by its file's name; needs `folders`, writes `output`.

        Raises:
            FlagError: see `check_ptxas_flags`.
        """
        ends = ["-o", str(output), str(source)]
        if source.name == _PTX:
            own = check_ptxas_flags(flags)
            return [str(self.folder / "bin" / self._assembler(own)), *own, *ends]
        headers = [f"-I{folder}" for folder in (self.folder / "include", self.python)]
        return [self.host.compiler, "-x", "c", "-O3", "-shared", "-fPIC", "-w", *headers, *ends]

    def key(self, kind: str, source: str, flags: Sequence[str]) -> str:
        """SHA-256, hexadecimal, of everything that decides what a build gives."""
        return content_key(self.identity, kind, *flags, source)

    def readable(self, log: str, source: Path, limit: int = 6000) -> str:  # noqa: ARG002  the same call as for C++
        """A log without paths, cut to `limit` characters."""
        return without_folders(log, limit)

    def _assembler(self, flags: Sequence[str]) -> str:
        number = re.search(r"--gpu-name=sm_(\d+)", " ".join(flags))
        own = number is not None and int(number[1]) >= _BLACKWELL and "ptxas-blackwell" in dict(self.assemblers)
        return "ptxas-blackwell" if own else "ptxas"


def _python_headers() -> Path:
    """Where Python.h is; some systems name a folder of their own first that has none.

    Raises:
        NoTriton: nowhere.
    """
    for scheme in (sysconfig.get_default_scheme(), "posix_prefix"):
        folder = Path(sysconfig.get_path("include", scheme))
        if (folder / "Python.h").is_file():
            return folder
    raise NoTriton("Python.h is not installed, and what launches a kernel of Triton is built with it")
