"""Builds for boxes: a request in, the path of a library or a compiler's log out.  Once per content, however many ask.

The compiler runs in a compile box of its own; what it made is kept in a cache keyed by source, flags and compiler, and
linked into the folder that the asking box can read.
Not here: the command lines (`toolchain`), the compile box (`sandbox.compile_box`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pkb_env import hardware
from pkb_env.box.channel import ChannelClosed
from pkb_env.config import EvalConfig, cache_dir
from pkb_env.errors import HarnessError
from pkb_env.native_text import findings_in
from pkb_env.sandbox.launcher import Zygote
from pkb_env.submission import MAX_SOURCE_BYTES
from pkb_env.toolchain import SOURCE_NAME, FlagError, Prepared, Toolchain, bind_functions, check_flags

_MEMORY_BYTES, _FILE_BYTES = 4 << 30, 64 << 20
_MOST_PREFETCHED = 4
_SLACK_S = 30.0
Body = dict[str, Any]


@dataclass(frozen=True)
class Order:
    """A build, checked."""

    kind: str
    source: str
    flags: tuple[str, ...]
    name: str = ""
    """Module name of an extension."""

    @classmethod
    def of(cls, request: Any) -> Order:
        """Read a request; the box may have sent anything.

        Raises:
            FlagError: it is no request, or asks for what is not allowed.
        """
        if not isinstance(request, dict) or request.get("kind") not in ("cpp", "extension"):
            raise FlagError(f"a build request must be of kind 'cpp' or 'extension', not {str(request)[:80]!r}")
        flags = check_flags(_texts(request.get("flags"), "flags"))
        if request["kind"] == "cpp":
            return cls("cpp", _permitted(_texts([request.get("source")], "source")[0]), flags)
        functions = request.get("functions")
        if functions is not None and not (isinstance(functions, dict) and all(isinstance(v, str) for v in functions.values())):
            raise FlagError(f"functions must map names to docstrings, not {str(functions)[:80]!r}")
        source = bind_functions(_texts(request.get("cpp_sources"), "cpp_sources"), functions)
        return cls("extension", _permitted(source), flags, str(request.get("name")))


def _texts(value: Any, what: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise FlagError(f"{what} must be text, not {str(value)[:80]!r}")
    return value


def _permitted(source: str) -> str:
    """The source, unless the screen forbids what is in it; here it also sees what was put together at run time."""
    if len(source) > MAX_SOURCE_BYTES:
        raise FlagError(f"a source of {len(source)} characters; at most {MAX_SOURCE_BYTES} are compiled")
    for finding in findings_in(source):
        if finding.severity == "forbid":
            raise FlagError(f"{SOURCE_NAME}:{finding.line}: {finding.message}")
    return source


@dataclass
class Counters:
    """How often a compiler really ran, and how often the cache answered."""

    built: int = 0
    cached: int = 0
    build_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Broker:
    """Thread-safe; the prepared toolchain is made at the first build."""

    def __init__(self, zygote: Zygote, config: EvalConfig, root: Path | None = None) -> None:
        self._zygote, self._config = zygote, config
        self._root = root or cache_dir()
        self._builds = self._root / "builds"
        self._lock = threading.Lock()
        self._running_compilers = threading.BoundedSemaphore(max(1, hardware.cores()))
        self._running: dict[str, Future[Body]] = {}
        self._prepared: Prepared | None = None
        self.counters = Counters()

    def prepared(self) -> Prepared:
        """The toolchain with its precompiled header and the box's native library.

        Raises:
            NoCompiler: this machine has no C++ compiler, or it cannot build ours.
        """
        with self._lock:
            if self._prepared is None:
                self._prepared = Toolchain.detect().prepare(self._root / "toolchain")
            return self._prepared

    @property
    def version(self) -> str:
        """The compiler's name in records."""
        return self.prepared().toolchain.version

    def build(self, request: Any, folder: Path) -> Body:
        """Serve a box's request: {"path"} inside `folder`, or {"error": log, "reason"}."""
        try:
            reply = self._once(Order.of(request))
        except FlagError as error:
            return {"error": str(error), "reason": "flags"}
        if "path" not in reply:
            return reply
        target = folder / Path(reply["path"]).name
        with contextlib.suppress(FileExistsError):
            _link(Path(reply["path"]), target)
        return {"path": str(target)}

    def prefetch(self, sources: tuple[tuple[str, tuple[str, ...]], ...]) -> list[threading.Thread]:
        """Start building literal sources before a rank asks for them; failures show when it asks."""
        wanted = sources[:_MOST_PREFETCHED]
        threads = [threading.Thread(target=self._quietly, args=source, daemon=True) for source in wanted]
        for thread in threads:
            thread.start()
        return threads

    def _quietly(self, source: str, flags: tuple[str, ...]) -> None:
        with contextlib.suppress(FlagError, HarnessError):
            self._once(Order("cpp", source, check_flags(flags)))

    def _once(self, order: Order) -> Body:
        key = self.prepared().key(order.kind, order.source, (*order.flags, order.name))
        with self._lock:
            future = self._running.get(key)
            mine = future is None
            if future is None:
                future = self._running[key] = Future()
        if not mine:
            return future.result()
        try:
            future.set_result(self._cached_or_built(self._builds / f"{key}.so", order))
        except BaseException as error:
            future.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._running[key]
        return future.result()

    def _cached_or_built(self, done: Path, order: Order) -> Body:
        if done.exists():
            with self.counters.lock:
                self.counters.cached += 1
            return {"path": str(done)}
        self._builds.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="build-", dir=self._builds))
        try:
            return self._compile(folder, done, order)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _compile(self, folder: Path, done: Path, order: Order) -> Body:
        start = time.monotonic()
        source, library, prepared = folder / SOURCE_NAME, folder / "candidate.so", self.prepared()
        source.write_text(order.source, encoding="utf-8", errors="replace")
        if order.kind == "cpp":
            command, deadline = prepared.command(source, library, order.flags), self._config.compile_deadline_s
        else:
            prepared.prepare_extensions()
            command = prepared.extension_command(source, library, order.name, order.flags)
            deadline = self._config.extension_deadline_s
        with self._running_compilers:
            answer = self._run(folder, command, deadline)
        with self.counters.lock:
            self.counters.built += 1
            self.counters.build_s += time.monotonic() - start
        log = prepared.readable(str(answer["log"]), source)
        if answer["code"] is None:
            return {"error": f"the compiler did not end within {deadline:g} s\n{log}", "reason": "deadline"}
        if answer["code"] != 0 or not library.is_file() or library.is_symlink():
            return {"error": log or f"the compiler ended with code {answer['code']}", "reason": "compiler"}
        library.chmod(0o555)
        library.rename(done)
        return {"path": str(done)}

    def _run(self, folder: Path, command: list[str], deadline_s: float) -> Body:
        channel = self._zygote.spawn("compile")
        walls = [n for n, why_not in self._zygote.walls.items() if not why_not and n not in self._config.keep_open]
        prepared = self.prepared()
        read = [*self._zygote.read_paths, *map(str, (prepared.folder, *prepared.toolchain.folders))]
        environment = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "TMPDIR": str(folder), "HOME": str(folder)}
        try:
            channel.send({
                "folder": str(folder), "command": command, "deadline_s": deadline_s, "walls": walls, "read": read,
                "environment": environment, "memory_bytes": _MEMORY_BYTES, "file_bytes": _FILE_BYTES,
            })  # fmt: skip
            return channel.recv(deadline_s + _SLACK_S).body
        except (ChannelClosed, TimeoutError) as error:
            raise HarnessError(f"the compile box is gone: {error}") from None
        finally:
            channel.close()


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        shutil.copy2(source, target)
