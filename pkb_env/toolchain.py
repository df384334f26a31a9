"""The recipe of C++: which compiler, which command line, which flags a candidate may give, and what is built beforehand.

Two kinds of sources: `cpp` (plain C ABI, native/pkb.h included through a precompiled header, some tenths of a second) and
`extension` (includes torch/extension.h as torch.utils.cpp_extension.load_inline does, about half a minute).

Not here: running a candidate's build (the broker does, in a sandbox), caching its result, CUDA.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pkb_env.compiler_flags import FlagError, check_flags
from pkb_env.errors import HarnessError

KINDS = ("cpp", "extension")
SOURCE_NAME = "candidate.cpp"
"""Name of the file a source is written to, as logs show it."""

_NATIVE = Path(__file__).parent / "box" / "native"
_HEADER, _LIBRARY = "pkb.h", "libpkb_native.so"
_CPP = ("-O3", "-march=native", "-std=c++20", "-fPIC")
_EXTENSION = ("-O1", "-std=c++20", "-fPIC", "-w", "-DTORCH_API_INCLUDE_EXTENSION_H")
_VARIANTS: Mapping[str, tuple[str, ...]] = {"plain": (), "fast-math": ("-ffast-math",)}
"""A precompiled header serves only the settings it was built with; these two cover what candidates ask for."""
_LOGS = ("-fdiagnostics-color=never", "-fmax-errors=20")

class NoCompiler(HarnessError):
    """This machine has no C++ compiler, or it cannot build what every box needs."""


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


@dataclass(frozen=True)
class Toolchain:
    """A C++ compiler of this machine."""

    compiler: str
    """Path of its executable."""
    version: str
    """First line of `--version` and the machine it builds for; part of every record."""

    @classmethod
    def detect(cls) -> Toolchain:
        """The compiler in `$CXX`, else g++, else clang++.

        Raises:
            NoCompiler: none of them runs.
        """
        for name in filter(None, (os.environ.get("CXX"), "g++", "clang++")):
            path = shutil.which(name)
            answer = _run([path, "--version"]) if path else None
            if path and answer and answer.returncode == 0:
                return cls(path, f"{answer.stdout.splitlines()[0]}, {platform.machine()}")
        raise NoCompiler(f"no C++ compiler: tried $CXX={os.environ.get('CXX', '')!r}, g++, clang++; install g++ or set CXX")

    @property
    def is_gcc(self) -> bool:
        return "clang" not in self.version

    @property
    def identity(self) -> str:
        """Content key of what a build depends on besides its source: compiler, processor, our headers, our flags."""
        parts = [self.version, _processor(), " ".join((*_CPP, *_EXTENSION))]
        parts += [path.name + "\0" + path.read_text() for path in sorted(_NATIVE.iterdir()) if path.is_file()]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def prepare(self, cache_dir: Path) -> Prepared:
        """Build the native library and the precompiled header, unless the cache has them; safe while others prepare.

        Raises:
            NoCompiler: the compiler fails on them; carries its log.
        """
        identity = self.identity
        folder = cache_dir / f"toolchain-{identity[:24]}"
        if not folder.is_dir():
            cache_dir.mkdir(parents=True, exist_ok=True)
            with _one_builder(cache_dir / f".{folder.name}.lock"):
                if not folder.is_dir():
                    self._build(folder)
        return Prepared(self, folder, identity)

    def _build(self, folder: Path) -> None:
        """Build aside and rename, so that the folder is there only when it is whole."""
        aside = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
        try:
            for source in _NATIVE.iterdir():
                if source.is_file():
                    shutil.copy(source, aside)
            self._must([*_CPP, "-O2", "-shared", "-o", _LIBRARY, "pkb_native.cpp"], aside)
            if self.is_gcc:
                (aside / f"{_HEADER}.gch").mkdir()
                for name, flags in _VARIANTS.items():
                    self._must([*_CPP, *flags, "-x", "c++-header", "-o", f"{_HEADER}.gch/{name}", _HEADER], aside)
            aside.chmod(0o755)
            aside.rename(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _must(self, arguments: Sequence[str], folder: Path) -> None:
        done = _run([self.compiler, *arguments], folder)
        if done.returncode:
            raise NoCompiler(f"{self.version} cannot build the native library (exit {done.returncode}):\n{done.stderr[-4000:]}")


@dataclass(frozen=True)
class Prepared:
    """A compiler with everything that is built once per machine."""

    toolchain: Toolchain
    folder: Path
    """Read by every build: headers, precompiled header, native library."""
    identity: str

    @property
    def native_library(self) -> Path:
        """What `symm_mem.attach` loads."""
        return self.folder / _LIBRARY

    def command(self, source: Path, output: Path, flags: Sequence[str] = ()) -> list[str]:
        """The command line that builds a plain C++ source; needs `folder` and the system's headers, writes `output`.

        Raises:
            FlagError: see `check_flags`.
        """
        own = check_flags(flags)
        header = str(self.folder / _HEADER)
        return [
            self.toolchain.compiler, *_CPP, *self._logs(), *own, "-shared", "-include", header, "-o", str(output), str(source),
        ]  # fmt: skip

    def extension_command(self, source: Path, output: Path, name: str, flags: Sequence[str] = ()) -> list[str]:
        """The command line that builds a Python module over torch's C++ interface; also needs torch's and Python's headers.

        Raises:
            FlagError: see `check_flags`; or the name is no module name.
        """
        own = check_flags(flags)
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise FlagError(f"extension name {name!r} is not a plain module name")
        return [
            self.toolchain.compiler, *_EXTENSION, *self._logs(), *own, f"-DTORCH_EXTENSION_NAME={name}", *_torch_macros(),
            *(f"-isystem{path}" for path in torch_includes()), "-shared", "-include", "torch/extension.h",
            "-o", str(output), str(source), f"-L{_torch_folder() / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python",
        ]  # fmt: skip

    def key(self, kind: str, source: str, flags: Sequence[str]) -> str:
        """SHA-256, hexadecimal, of everything that decides what a build gives."""
        parts = [self.identity, kind, _torch_version() if kind == "extension" else "", *flags, source]
        return hashlib.sha256("\0".join(f"{len(p)} {p}" for p in parts).encode("utf-8", "surrogatepass")).hexdigest()

    def readable(self, log: str, source: Path, limit: int = 6000) -> str:
        """A compiler's log without this machine's paths, cut in the middle of nothing but its end."""
        for path in (source.parent, self.folder, _NATIVE, _torch_folder() / "include"):
            log = log.replace(f"{path}/", "")
        return log if len(log) <= limit else log[:limit] + f"\n... {len(log) - limit} more characters"

    def _logs(self) -> tuple[str, ...]:
        return _LOGS if self.toolchain.is_gcc else ("-fno-color-diagnostics", "-ferror-limit=20")


def torch_includes() -> tuple[Path, ...]:
    """Header folders of torch and Python that a box for extensions must be able to read."""
    include = _torch_folder() / "include"
    return (include, include / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include")))


def _torch_folder() -> Path:
    import torch  # noqa: PLC0415  plain sources need no torch

    return Path(torch.__file__).parent


def _torch_version() -> str:
    import torch  # noqa: PLC0415

    return str(torch.__version__)


def _torch_macros() -> list[str]:
    """What an extension must share with torch: the standard library's ABI and, for older versions, pybind11's marks."""
    import torch  # noqa: PLC0415

    found = [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):
        value = getattr(torch._C, f"_PYBIND11_{name}", None)  # noqa: SLF001  torch offers them only there
        if value is not None:
            found.append(f'-DPYBIND11_{name}="{value}"')
    return found


def _processor() -> str:
    """What -march=native looks at; a cache folder may be shared by unlike machines."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    return "\n".join(sorted(set(re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*$", text, re.MULTILINE))))


def _run(command: Sequence[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    plain = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TMPDIR": tempfile.gettempdir()}
    return subprocess.run(command, cwd=folder, env=plain, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


@contextmanager
def _one_builder(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
