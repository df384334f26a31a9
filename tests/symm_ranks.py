"""Real forked ranks with symmetric memory, for tests: a launcher process forks them as a zygote does.

A test names a function of its module; every rank calls it with a `Here`.
Not here: sandboxes; a rank may run the compiler itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pkb_env.toolchain import SOURCE_NAME, Toolchain

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
ARENA_BYTES = 32 * MIB
_DEADLINE_S = 120


@dataclass(frozen=True)
class Here:
    """What a rank knows about itself."""

    rank: int
    world: int
    records: mmap.mmap
    folder: Path

    @property
    def peers(self) -> list[int]:
        return [p for p in range(self.world) if p != self.rank]

    def record(self, rank: int) -> bytes:
        """What a rank waits for, as a supervisor reads it."""
        return self.records[64 * rank : 64 * rank + 64]


def symm() -> Any:
    """The copy of `symm_mem` that boxes import."""
    return importlib.import_module("pkb_box.symm_mem")


def join(here: Here) -> None:
    """Initialise torch.distributed."""
    store = dist.FileStore(str(here.folder / "store"), here.world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=here.rank, world_size=here.world, timeout=timedelta(seconds=60))


def build(request: dict[str, Any]) -> dict[str, Any]:
    """A broker without a sandbox, for plain C++."""
    prepared = Toolchain.detect().prepare(Path(os.environ["TEST_CACHE"]))
    final = prepared.folder.parent / f"{prepared.key('cpp', request['source'], request['flags'])}.so"
    if final.exists():
        return {"path": str(final)}
    with tempfile.TemporaryDirectory(dir=prepared.folder.parent) as folder:
        source, output = Path(folder, SOURCE_NAME), Path(folder, "candidate.so")
        source.write_text(request["source"])
        done = subprocess.run(prepared.command(source, output, request["flags"]), capture_output=True, text=True, check=False)
        if done.returncode:
            return {"error": prepared.readable(done.stderr, source), "reason": "compiler"}
        output.rename(final)
    return {"path": str(final)}


# ---- launcher ---------------------------------------------------------------------------------------------------------


def serve(native: str) -> None:
    """Fork the ranks of every order on standard input, answer with their exit codes."""
    symm()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_launch(json.loads(line), native)) + "\n")
        sys.stdout.flush()


def _launch(order: dict[str, Any], native: str) -> list[int]:
    world = order["world"]
    fds, records = symm().create(world, ARENA_BYTES), mmap.mmap(-1, 64 * world)
    pids = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                os._exit(_run_rank(order, Here(rank, world, records, Path(folder)), fds, native))
            pids.append(pid)
        codes = _wait_all(pids, time.monotonic() + _DEADLINE_S)
    for fd in fds:
        os.close(fd)
    return codes


def _run_rank(order: dict[str, Any], here: Here, fds: list[int], native: str) -> int:
    try:
        torch.set_num_threads(1)
        record = ctypes.addressof(ctypes.c_char.from_buffer(here.records)) + 64 * here.rank
        symm().attach(fds, here.rank, here.world, native, record)
        getattr(importlib.import_module(order["module"]), f"body_{order['body']}")(here, *order["arguments"])
    except BaseException:  # noqa: BLE001  pytest's failures are no Exceptions
        sys.stderr.write(f"rank {here.rank} {traceback.format_exc()}\n")
        sys.stderr.flush()
        return 1
    return 0


def _wait_all(pids: list[int], deadline: float) -> list[int]:
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes and (status := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(status[1])
        failed = any(codes.values())
        if time.monotonic() > deadline or failed:
            time.sleep(0.3 if failed else 0)
            for pid in (p for p in pids if p not in codes):
                os.kill(pid, 9)
        time.sleep(0.002)
    return [codes[p] for p in pids]


@contextlib.contextmanager
def launcher(folder: Path, cache: Path, module: str) -> Iterator[Callable[..., None]]:
    """Gives `run(body, world, *arguments)`, which fails with the ranks' tracebacks unless every rank ends well."""
    native = Toolchain.detect().prepare(cache).native_library
    shutil.copytree(ROOT / "pkb_env" / "box", folder / "site" / "pkb_box")
    path = f"{folder / 'site'}:{ROOT}:{ROOT / 'tests'}"
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TEST_CACHE": str(cache)}
    command = [sys.executable, "-c", f"import symm_ranks; symm_ranks.serve({str(native)!r})"]
    with (
        (folder / "errors").open("w") as errors,
        subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, stderr=errors, text=True) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        orders, answers = process.stdin, process.stdout

        def run(body: str, world: int, *arguments: str) -> None:
            errors.truncate(0)
            orders.write(json.dumps({"module": module, "body": body, "world": world, "arguments": arguments}) + "\n")
            orders.flush()
            answer = answers.readline()
            text = (folder / "errors").read_text(errors="replace").replace("\0", "")
            assert answer, text
            assert json.loads(answer) == [0] * world, text

        yield run
        orders.close()
