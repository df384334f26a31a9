"""Builds for boxes: a request in, the path of a library or a compiler's log out.  Once per content, however many ask.

The compiler runs in a compile box of its own; what it made is kept in a cache keyed by source, flags and compiler, and
linked into the folder that the asking box can read.
Not here: reading a request (`build_order`), which compilers there are (`compilers`), their command lines (`toolchain`,
`cuda_toolchain`, `triton_toolchain`), the compile box (`sandbox.compile_box`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

from pkb_env import build_cache, hardware
from pkb_env.box.channel import Channel, ChannelClosed
from pkb_env.build_order import Order
from pkb_env.cancellation import hang_up
from pkb_env.compilers import Compilers
from pkb_env.config import EvalConfig, cache_dir
from pkb_env.cuda_toolchain import CudaToolchain, NoCudaCompiler
from pkb_env.errors import HarnessError
from pkb_env.locks import MachineLock
from pkb_env.sandbox.launcher import Zygote
from pkb_env.source import Literal
from pkb_env.toolchain import FlagError, Prepared
from pkb_env.triton_toolchain import NoTriton, TritonToolchain

_MEMORY_BYTES, _FILE_BYTES = 4 << 30, 64 << 20
_MOST_PREFETCHED = 4
_SLACK_S = 30.0
_LOOK_UP_S = 0.1
_PART_KILLED = re.compile(
    r"(^\S+: fatal error: Killed signal terminated program \S+\ncompilation terminated\.|: unable to execute command: Killed"
    r"|^\S+ error +: '\S+' died due to signal 9 .*)\s*\Z", re.MULTILINE)  # fmt: skip
"""How the log of g++, clang++ or nvcc ends when a program that it had started was killed; a source can make it end so too."""
Body = dict[str, Any]
Wanted = list[Callable[[], bool]]
"""Of everybody who asked for a build: whether it still waits."""


@dataclass
class Counters:
    """How often a compiler really ran, and how often the cache answered."""

    built: int = 0
    cached: int = 0
    build_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Builds(Enum):
    """When a compiler may run for a box."""

    SHARED = auto()
    """While nobody has the machine alone."""
    ALONE = auto()
    """At any time: the box itself has the machine alone, and is being loaded."""
    NONE = auto()
    """Not at all: its calls are being timed.  What is in the cache is there."""


class Broker(Compilers):
    """Thread-safe."""

    def __init__(
        self, zygote: Zygote, config: EvalConfig, root: Path | None = None, lock: MachineLock | None = None,
        work: Path | None = None,
    ) -> None:  # fmt: skip
        """`root`: the cache; `work`: where compilers work, a folder of the same file system that goes when its owner does."""
        self._zygote, self._config, self._machine = zygote, config, lock or MachineLock()
        super().__init__(root or cache_dir())
        self._builds = self._root / "builds"
        self._work = work or self._builds
        self._running_compilers = threading.BoundedSemaphore(max(1, hardware.cores()))
        self._running: dict[str, Future[Body]] = {}
        self._wanted: dict[Future[Body], Wanted] = {}
        self.counters = Counters()

    def build(
        self, request: Any, folder: Path, builds: Builds = Builds.SHARED, wanted: Callable[[], bool] = lambda: True
    ) -> Body:
        """Serve a box's request: {"path"} inside `folder`, or {"error": log, "reason"}; of Triton's assemblers, {"versions"}.

        Raises:
            HarnessError: the compile box is gone, or nobody who asked wants the library any more.
        """
        try:
            if request == {"kind": "triton"}:
                return {"versions": dict(self.triton().assemblers)}
            reply = self._once(Order.of(request), builds, wanted)
        except FlagError as error:
            return {"error": str(error), "reason": "flags"}
        except (NoCudaCompiler, NoTriton) as error:
            return {"error": str(error), "reason": "unsupported"}
        if "path" not in reply:
            return reply
        target = folder / Path(reply["path"]).name
        with contextlib.suppress(FileExistsError):
            _link(Path(reply["path"]), target)
        return {"path": str(target)}

    @contextlib.contextmanager
    def prefetched(self, sources: tuple[Literal, ...]) -> Iterator[list[threading.Thread]]:
        """Build literal sources before a rank asks for them; failures show when it asks.  No build outlasts the block."""
        over = threading.Event()
        threads = [
            threading.Thread(target=self._quietly, args=(source, lambda: not over.is_set()), daemon=True)
            for source in sources[:_MOST_PREFETCHED]
        ]
        for thread in threads:
            thread.start()
        try:
            yield threads
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def _quietly(self, source: Literal, wanted: Callable[[], bool]) -> None:
        request = {"kind": source.kind, "source": source.source, "flags": list(source.flags)}
        with contextlib.suppress(FlagError, HarnessError):
            self._once(Order.of(request), Builds.SHARED, wanted)

    def _once(self, order: Order, builds: Builds, wanted: Callable[[], bool]) -> Body:
        key = self._recipe(order).key(order.kind, order.source, (*order.flags, order.name))
        with self._lock:
            future = self._running.get(key)
            mine = future is None
            if future is None:
                future = self._running[key] = Future()
                self._wanted[future] = []
            self._wanted[future].append(wanted)
        if not mine:
            return future.result()
        try:
            future.set_result(self._cached_or_built(self._builds / f"{key}.so", order, builds, self._wanted[future]))
        except BaseException as error:
            future.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._running[key], self._wanted[future]
        return future.result()

    def _cached_or_built(self, done: Path, order: Order, builds: Builds, wanted: Wanted) -> Body:
        if build_cache.find(done):
            with self.counters.lock:
                self.counters.cached += 1
            return {"path": str(done)}
        if builds is Builds.NONE:
            return {"error": "no compiler runs while calls are timed: build at import or in the first call", "reason": "timed"}
        self._builds.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="build-", dir=self._work))
        try:
            with self._machine.compiling() if builds is Builds.SHARED else contextlib.nullcontext():
                return self._compile(folder, done, order, wanted)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _compile(self, folder: Path, done: Path, order: Order, wanted: Wanted) -> Body:
        start = time.monotonic()
        source, library, recipe = folder / order.file_name, folder / "candidate.so", self._recipe(order)
        source.write_text(order.source, encoding="utf-8", errors="replace")
        deadline = self._config.compile_deadline_s
        if order.is_extension and not isinstance(recipe, TritonToolchain):
            deadline = self._config.extension_deadline_s
            recipe.prepare_extensions()
            command = recipe.extension_command(source, library, order.name, order.flags)
        else:
            command = recipe.command(source, library, order.flags)
        answer = self._run(folder, command, deadline, wanted, recipe.folders)
        if _PART_KILLED.search(str(answer["log"])):  # what was killed is seldom killed twice; a text reads the same again
            answer = self._run(folder, command, deadline, wanted, recipe.folders)
        with self.counters.lock:
            self.counters.built += 1
            self.counters.build_s += time.monotonic() - start
        if answer["code"] == -signal.SIGKILL:
            raise HarnessError("a compiler was killed from outside, which is also what the kernel does when memory runs out")
        log = recipe.readable(str(answer["log"]), source)
        if answer["code"] is None:
            return {"error": f"the compiler did not end within {deadline:g} s\n{log}", "reason": "deadline"}
        if answer["code"] != 0 or not library.is_file() or library.is_symlink():
            return {"error": log or f"the compiler ended with code {answer['code']}", "reason": "compiler"}
        library.chmod(0o555)
        library.rename(done)
        build_cache.trim(self._builds)
        return {"path": str(done)}

    def _recipe(self, order: Order) -> Prepared | CudaToolchain | TritonToolchain:
        return self.triton() if order.is_triton else self.cuda() if order.is_cuda else self.prepared()

    def _run(self, folder: Path, command: list[str], deadline_s: float, wanted: Wanted, folders: Sequence[Path]) -> Body:
        """What the compile box says of one run."""
        with self._running_compilers:
            if not any(wants() for wants in wanted):
                raise HarnessError("nobody wants the library any more")
            return self._run_now(folder, command, deadline_s, wanted, folders)

    def _run_now(self, folder: Path, command: list[str], deadline_s: float, wanted: Wanted, folders: Sequence[Path]) -> Body:
        channel = self._zygote.spawn("compile")
        walls = [n for n, why_not in self._zygote.walls.items() if not why_not and n not in self._config.keep_open]
        read = [*self._zygote.read_paths, *map(str, folders)]
        environment = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "TMPDIR": str(folder), "HOME": str(folder)}
        try:
            channel.send({
                "folder": str(folder), "command": command, "deadline_s": deadline_s, "walls": walls, "read": read,
                "environment": environment, "memory_bytes": _MEMORY_BYTES, "file_bytes": _FILE_BYTES,
            })  # fmt: skip
            return _answer(channel, deadline_s + _SLACK_S, wanted)
        except (ChannelClosed, TimeoutError) as error:
            hang_up(channel)
            raise HarnessError(f"the compile box is gone: {error}") from None
        finally:
            channel.close()


def _answer(channel: Channel, seconds: float, wanted: Wanted) -> Body:
    """What the compile box says; it ends when nobody wants to hear it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(TimeoutError):
            return channel.recv(_LOOK_UP_S).body
        if not any(wants() for wants in wanted):
            raise ChannelClosed("nobody wants the library any more")
    raise TimeoutError(f"no answer within {seconds:g} s")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        shutil.copy2(source, target)
