"""The recipe of C++: which compiler, which command line, and what is built beforehand.

Two kinds of sources: `cpp` (plain C ABI, native/pkb.h included through a precompiled header, some tenths of a second) and
`extension` (includes torch/extension.h as torch.utils.cpp_extension.load_inline does; about half a minute, half of that or
less after `prepare_extensions`).

A precompiled header is used only where every setting of code generation is the one it was built with: gcc takes it with
other -O levels too, and then crashes now and then.

Not here: running a candidate's build (the broker does, in a sandbox), caching its result, CUDA (`cuda_toolchain`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pkb_env import torch_extension
from pkb_env.compiler_flags import FlagError, check_flags
from pkb_env.compiler_folders import compiler_folders, run
from pkb_env.errors import HarnessError
from pkb_env.torch_extension import bind_functions

__all__ = ["SOURCE_NAME", "FlagError", "NoCompiler", "Prepared", "Toolchain", "bind_functions", "check_flags", "content_key"]

SOURCE_NAME = "candidate.cpp"
"""Name of the file a source is written to, as logs show it."""

_NATIVE = Path(__file__).parent / "box" / "native"
_HEADER, _LIBRARY, _SMALL_HEADER = "pkb.h", "libpkb_native.so", "torch_extension.h"
_BASE = ("-O3", "-march=native", "-std=c++20", "-fPIC")
_FAST_MATH = "-ffast-math"
_LOWER_LEVELS = ("-O1", "-O2")
"""Raised to -O3 for extensions, so that they share one precompiled header."""
_HARMLESS = ("-D", "-U", "-W", "-g0")
"""Flags that leave a precompiled header valid; gcc itself refuses one whose names a macro would change."""


class NoCompiler(HarnessError):
    """This machine has no C++ compiler, or it cannot build what every box needs."""


@dataclass(frozen=True)
class Toolchain:
    """A C++ compiler of this machine: its path, and its version for records."""

    compiler: str
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
            answer = run([path, "--version"]) if path else None
            if path and answer and answer.returncode == 0:
                return cls(path, f"{answer.stdout.splitlines()[0]}, {platform.machine()}")
        raise NoCompiler(f"no C++ compiler: tried $CXX={os.environ.get('CXX', '')!r}, g++, clang++; install g++ or set CXX")

    @property
    def is_gcc(self) -> bool:
        return "clang" not in self.version

    @property
    def identity(self) -> str:
        """Content key of what a build depends on besides its source: compiler, processor, our headers, our recipe."""
        parts = [self.version, _processor(), Path(__file__).read_text(encoding="utf-8")]
        parts += [path.name + "\0" + path.read_text(encoding="utf-8") for path in _native_files()]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def prepare(self, cache_dir: Path) -> Prepared:
        """Build the native library and the precompiled headers, unless the cache has them; safe while others prepare.

        Raises:
            NoCompiler: the compiler fails on them; carries its log.
        """
        identity = self.identity
        folder = cache_dir / f"toolchain-{identity[:24]}"
        with _built_once(folder) as aside:
            if aside is not None:
                for source in _native_files():
                    shutil.copy(source, aside)
                self.must([*_BASE, "-shared", "-o", _LIBRARY, "pkb_native.cpp"], aside)
                self._precompile(aside)
        return Prepared(self, folder, identity)

    def _precompile(self, folder: Path) -> None:
        """Two copies of the header, each with the precompiled form of one setting; clang has no use for them."""
        for name, flags in (("plain", ()), ("fast-math", (_FAST_MATH,))) if self.is_gcc else ():
            (folder / name).mkdir()
            shutil.copy(folder / _HEADER, folder / name)
            self.must([*_BASE, *flags, "-x", "c++-header", "-o", f"{name}/{_HEADER}.gch", f"{name}/{_HEADER}"], folder)

    def must(self, arguments: Sequence[str], folder: Path) -> None:
        """Run the compiler on our own sources.  Raises NoCompiler with its log."""
        done = run([self.compiler, *arguments], folder)
        if done.returncode:
            raise NoCompiler(f"{self.version} cannot build the native library (exit {done.returncode}):\n{done.stderr[-4000:]}")


@dataclass(frozen=True)
class Prepared:
    """A compiler with everything that is built once per machine."""

    toolchain: Toolchain
    folder: Path
    """Read by every build: headers, precompiled headers, native library."""
    identity: str

    @property
    def folders(self) -> tuple[Path, ...]:
        """What a build reads besides the system's headers."""
        return (self.folder, *compiler_folders(self.toolchain.compiler))

    @property
    def native_library(self) -> Path:
        """What `symm_mem.attach` loads."""
        return self.folder / _LIBRARY

    def command(self, source: Path, output: Path, flags: Sequence[str] = ()) -> list[str]:
        """The command line that builds a plain C++ source; needs `folder` and the system's headers, writes `output`.

        Raises:
            FlagError: see `check_flags`.
        """
        own = _without_defaults(check_flags(flags))
        variant = {(): "plain", (_FAST_MATH,): "fast-math"}.get(_settings(own), "") if self.toolchain.is_gcc else ""
        header = str(self.folder / variant / _HEADER)
        rest = ["-shared", "-include", header, "-o", str(output), str(source)]
        return [self.toolchain.compiler, *_BASE, *self._logs(), *own, *rest]

    def extension_command(self, source: Path, output: Path, name: str, flags: Sequence[str] = ()) -> list[str]:
        """The command line that builds a Python module over torch's C++ interface; also needs torch's and Python's headers.

        Raises:
            FlagError: see `check_flags`; or the name is no module name.
        """
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise FlagError(f"extension name {name!r} is not a plain module name")
        own = [f for f in _without_defaults(check_flags(flags)) if f not in _LOWER_LEVELS]
        small = not _settings(own) and not torch_extension.needs_everything(source.read_text(encoding="utf-8"))
        headers = [self._small_torch] if small and self._small_torch.is_dir() else []
        return [
            self.toolchain.compiler, *_extension_flags(headers), *self._logs(), *own, f"-DTORCH_EXTENSION_NAME={name}", "-shared",
            "-include", "torch/extension.h", "-o", str(output), str(source), f"-L{torch_extension.torch_folder() / 'lib'}",
            *torch_extension.LIBRARIES,
        ]  # fmt: skip

    def prepare_extensions(self) -> None:
        """Precompile a small torch/extension.h: most of a minute and 0.6 GB once, every later build takes half the time or less.

        Raises:
            NoCompiler: the compiler fails on torch's headers; carries its log.
        """
        with _built_once(self._small_torch) as aside:
            if aside is not None:
                (aside / "torch").mkdir()
                shutil.copy(self.folder / _SMALL_HEADER, aside / "torch" / "extension.h")
                if self.toolchain.is_gcc:
                    out = ["-x", "c++-header", "-o", "torch/extension.h.gch", "torch/extension.h"]
                    self.toolchain.must([*_extension_flags([]), *out], aside)

    @property
    def _small_torch(self) -> Path:
        return self.folder / f"torch-{torch_extension.torch_version()}"

    def key(self, kind: str, source: str, flags: Sequence[str]) -> str:
        """SHA-256, hexadecimal, of everything that decides what a build gives."""
        torch = torch_extension.torch_version() if kind == "extension" else ""
        return content_key(self.identity, kind, torch, *flags, source)

    def readable(self, log: str, source: Path, limit: int = 6000) -> str:
        """A compiler's log without this machine's paths, cut to `limit` characters."""
        for path in (source.parent, self.folder / "plain", self.folder / "fast-math", self.folder, torch_extension.includes()[0]):
            log = log.replace(f"{path}/", "")
        return log if len(log) <= limit else log[:limit] + f"\n... {len(log) - limit} more characters"

    def _logs(self) -> tuple[str, ...]:
        if self.toolchain.is_gcc:
            return ("-fdiagnostics-color=never", "-fmax-errors=20")
        return ("-fno-color-diagnostics", "-ferror-limit=20")


def content_key(*parts: str) -> str:
    """SHA-256, hexadecimal, of texts and of where each one ends."""
    return hashlib.sha256("\0".join(f"{len(p)} {p}" for p in parts).encode("utf-8", "surrogatepass")).hexdigest()


def _without_defaults(flags: Sequence[str]) -> tuple[str, ...]:
    """Flags that differ from what every build has; of several -O levels the last one counts."""
    levels = [f for f in flags if f.startswith("-O")][-1:]
    rest = (f for f in flags if not f.startswith("-O"))
    return tuple(f for f in (*levels, *rest) if f not in _BASE)


def _settings(flags: Sequence[str]) -> tuple[str, ...]:
    return tuple(f for f in flags if not f.startswith(_HARMLESS))


def _extension_flags(headers: Sequence[Path]) -> list[str]:
    folders = (*headers, *torch_extension.includes())
    return [*_BASE, "-w", *torch_extension.macros(), *(f"-isystem{folder}" for folder in folders)]


def _native_files() -> list[Path]:
    return sorted(path for path in _NATIVE.iterdir() if path.suffix in {".h", ".cpp"})


def _processor() -> str:
    """What -march=native looks at; a cache folder may be shared by unlike machines."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    return "\n".join(sorted(set(re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*$", text, re.MULTILINE))))


@contextmanager
def _built_once(folder: Path) -> Iterator[Path | None]:
    """A folder to build in, renamed to `folder` when all went well; None when `folder` is there already."""
    if folder.is_dir():
        yield None
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            yield None
            return
        aside = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
        try:
            yield aside
            aside.chmod(0o755)
            aside.rename(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
