"""Runs a trusted function on W real ranks without a box: forked processes, gloo, a file store, one OpenMP thread each.

The fork server imports torch once and runs no operation, so that a rank starts in milliseconds and forks safely.  What is
trusted to leave nothing behind (references) runs on ranks that stay for the next.
Not here: candidates, which run in boxes only (`boxes`); what is done with the answers (`trial`).
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import resource
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

import problems
from pkb_env.errors import HarnessError

_CONTEXT = get_context("forkserver")
_PRELOADED = ["torch", "torch.distributed", "pkb_env.unboxed", "__main__"]


class RankFailed(HarnessError):
    """A rank raised, died or did not answer in time."""


@dataclass(frozen=True)
class ReferenceRun:
    """What the reference of a problem did on one rank."""

    output: Any
    args: tuple[Any, ...]
    """Its arguments after the call."""
    peak_bytes: int
    """Most memory that the rank ever had."""


class Ranks:
    """Forked processes in one default group that carry out one job after another, until something goes wrong."""

    def __init__(self, world_size: int) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        _CONTEXT.set_forkserver_preload(_PRELOADED)
        self._folder = tempfile.TemporaryDirectory()
        self._ends, self._processes = list[Connection](), list[ForkServerProcess]()
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe()
            place = (rank, world_size, str(Path(self._folder.name) / "store"), theirs)
            process = _CONTEXT.Process(target=_rank_main, args=place, daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], args: Sequence[tuple[Any, ...]], deadline_s: float) -> list[Any]:
        """One job; results in rank order.

        Raises:
            RankFailed: as `run_on_ranks`; these ranks are of no use any more.
        """
        for end, mine in zip(self._ends, args, strict=True):
            with contextlib.suppress(BrokenPipeError):  # its answer says more
                end.send((function, _pack(mine)))
        return _collect(self._ends, monotonic() + deadline_s)

    def kill(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
            process.join()
            process.close()
        self._folder.cleanup()


def run_on_ranks(function: Callable[..., Any], args: Sequence[tuple[Any, ...]], *, deadline_s: float = 60) -> list[Any]:
    """`function(*args[r])` on each rank r of len(args), inside an initialised default group; results in rank order.

    The function must be importable by name.  Warnings are errors on the ranks.

    Raises:
        RankFailed: a rank raised (with its traceback), died, or has not answered at the deadline.
    """
    ranks = Ranks(len(args))
    try:
        return ranks.run(function, args, deadline_s)
    finally:
        ranks.kill()


_STANDING: dict[int, Ranks] = {}
"""By world size, those that wait for the next job."""


@atexit.register
def _dismiss() -> None:
    for ranks in _STANDING.values():
        ranks.kill()


def _run_on_standing_ranks(function: Callable[..., Any], args: Sequence[tuple[Any, ...]], deadline_s: float) -> list[Any]:
    """The same on ranks that others have used, for what leaves nothing behind: it takes milliseconds."""
    ranks = _STANDING.pop(len(args), None) or Ranks(len(args))
    try:
        results = ranks.run(function, args, deadline_s)
    except BaseException:
        ranks.kill()
        raise
    _STANDING[len(args)] = ranks
    return results


def run_reference(name: str, inputs: Sequence[tuple[Any, ...]], *, deadline_s: float = 60) -> list[ReferenceRun]:
    """The reference of a problem on len(inputs) real ranks."""
    return _run_on_standing_ranks(_call_reference, [(name, args) for args in inputs], deadline_s)


def run_source(source: str, inputs: Sequence[tuple[Any, ...]]) -> list[ReferenceRun]:
    """The `solution` of a candidate's source on len(inputs) real ranks: for trusted sources only."""
    return _run_on_standing_ranks(_call_source, [(source, args) for args in inputs], 60)


def _call_reference(name: str, args: tuple[Any, ...]) -> ReferenceRun:
    return ReferenceRun(problems.load(name).reference(*args), args, peak_memory())


def _call_source(source: str, args: tuple[Any, ...]) -> ReferenceRun:
    names: dict[str, Any] = {"__name__": "candidate"}
    exec(compile(source, "candidate.py", "exec"), names)  # noqa: S102  a trusted source, and running it is the point
    return ReferenceRun(names["solution"](*args), args, peak_memory())


def peak_memory() -> int:
    """Most bytes that this process ever had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _collect(ends: list[Connection], until: float) -> list[Any]:
    results: dict[Connection, Any] = {}
    while len(results) < len(ends):
        ready = wait([end for end in ends if end not in results], timeout=max(0.0, until - monotonic()))
        if not ready:
            late = [rank for rank, end in enumerate(ends) if end not in results]
            raise RankFailed(f"ranks {late} have not answered at the deadline")
        for end in ready:
            assert isinstance(end, Connection)
            results[end] = _answer(ends.index(end), end)
    return [results[end] for end in ends]


def _answer(rank: int, end: Connection) -> Any:
    try:
        error, payload = end.recv()
    except EOFError:
        raise RankFailed(f"rank {rank} died without an answer") from None
    if error:
        raise RankFailed(f"rank {rank} raised:\n{error}")
    return _unpack(payload)


def _rank_main(rank: int, world_size: int, store: str, end: Connection) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    joined = False
    while True:
        try:
            function, args = end.recv()
            if not joined:
                dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), world_size, rank)
                joined = True
            result = function(*_unpack(args))
            dist.barrier()
            end.send((None, _pack(result)))
        except EOFError:
            return
        except BaseException:  # noqa: BLE001  whatever a rank raises is told to the caller
            end.send((traceback.format_exc(), b""))


def _pack(value: Any) -> bytes:
    """Tensors by value: the default way of multiprocessing would share memory that dies with its rank."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(payload: bytes) -> Any:
    return torch.load(io.BytesIO(payload), weights_only=False)
