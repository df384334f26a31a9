"""One rank: loads a module, calls its `solution` when told, puts the outputs on the wire.  Runs candidate and reference alike.

It never judges, never holds an expected output and never keeps a record; whatever it says is a claim of the process that
ran the candidate.  The time of a call is taken outside, from the go signal to the last rank's done signal.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import time
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from . import collectives, control
from .channel import Channel
from .setting_up import CPU, finish, join_group, stay_on_one_core
from .wire import Arena

CANDIDATE = "candidate.py"


@dataclass(frozen=True)
class Lines:
    """The descriptors of one rank."""

    channel: int
    go: int
    done: int
    dump: int
    output: int
    control: int


@dataclass
class Rank:
    """What the loop of one rank needs."""

    rank: int
    world_size: int
    channel: Channel
    page: control.Page
    go: int
    done: int
    device: torch.device = CPU
    inputs: Arena | None = None
    outputs: Arena | None = None
    solution: Callable[..., Any] | None = None
    names: tuple[str, ...] = ()
    operations: dict[int, Callable[[control.Order], None]] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)
    """What the supervisor learns with the news that this rank is ready."""


_current: Rank | None = None


def load(source: str, page: control.Page) -> Callable[..., Any]:
    """Execute a candidate's source as a module and return its `solution`."""
    page.enter("load")
    linecache.cache[CANDIDATE] = (len(source), None, source.splitlines(keepends=True), CANDIDATE)
    module = types.ModuleType("candidate")
    module.__file__ = CANDIDATE
    import sys  # noqa: PLC0415

    sys.modules["candidate"] = module
    exec(compile(source, CANDIDATE, "exec"), module.__dict__)  # noqa: S102  this is what a box is for
    solution: Callable[..., Any] = module.__dict__["solution"]
    return solution


def call(state: Rank, order: control.Order) -> None:
    """One call of `solution`; its outputs are on the wire when it returns."""
    assert state.inputs is not None and state.outputs is not None and state.solution is not None  # noqa: PT018
    woken = time.perf_counter_ns()
    state.page.enter("call")
    arguments = state.inputs.read(order.slot, order.nonce)
    state.outputs.begin(order.slot)
    called = time.perf_counter_ns()
    outputs = state.solution(*arguments)
    finish(state.device)
    returned = time.perf_counter_ns()
    state.outputs.write(order.slot, order.nonce, outputs, lambda tensor: _argument_of(state, arguments, tensor))
    finish(state.device)
    state.page.enter("returned")
    state.page.note_times(woken, called, returned, time.perf_counter_ns())


def profile(state: Rank, order: control.Order) -> None:
    """One call of `solution` that leaves in the place of its outputs which kernels ran."""
    assert state.inputs is not None and state.outputs is not None and state.solution is not None  # noqa: PT018
    from .profiled import kernels  # noqa: PLC0415  seconds, for whoever asks

    arguments, solution = state.inputs.read(order.slot, order.nonce), state.solution

    def act() -> None:
        solution(*arguments)
        finish(state.device)

    state.outputs.begin(order.slot)
    state.outputs.write(order.slot, order.nonce, kernels(act))


def new_output(*shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor where this call's outputs are read: returned from `solution`, it is not copied.

    The shape is given as for `torch.empty`.

    Good for the call that asked for it.  A tensor of your own may be returned just as well; outside of a box this is one.

    Raises:
        MemoryError: more is asked for than the problem's outputs take.
    """
    extents = [n for part in shape for n in (part if isinstance(part, Sequence) else [part])]
    if _current is None or _current.outputs is None:
        return torch.empty(extents, dtype=dtype, device=_current.device if _current else None)
    return _current.outputs.new(extents, dtype)


def _argument_of(state: Rank, arguments: tuple[Any, ...], tensor: torch.Tensor) -> str | None:
    """Name of the argument whose memory a tensor lies in."""
    assert state.inputs is not None
    place = state.inputs.contains(tensor)
    if place is None:
        return None
    best = max(
        (
            (at, i)
            for i, a in enumerate(arguments)
            if isinstance(a, torch.Tensor)
            for at in [state.inputs.contains(a)]
            if at is not None and at <= place
        ),
        default=(0, 0),
    )[1]
    return state.names[best] if best < len(state.names) else f"argument {best}"


def serve(state: Rank) -> None:
    """Obey the supervisor until it ends this process."""
    while True:
        _await_go(state)
        order = state.page.order()
        state.operations[order.operation](order)
        os.write(state.done, b"d")


def _await_go(state: Rank) -> None:
    if not os.read(state.go, 1):
        os._exit(0)  # the supervisor is gone


def tell_failure(state: Rank, error: BaseException) -> None:
    """Describe an exception to the supervisor, with the candidate's innermost line."""
    phase = state.page.status().phase
    state.page.enter("raised")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == CANDIDATE]
    log = getattr(error, "log", None)
    with contextlib.suppress(OSError):
        state.channel.send(
            {
                "event": "raised",
                "phase": phase,
                "type": type(error).__name__,
                "text": _text(error)[:2000],
                "line": frames[-1].lineno if frames else getattr(error, "lineno", None),
                "function": frames[-1].name if frames else None,
                "log": log[:20_000] if isinstance(log, str) else None,
            }
        )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as second:  # noqa: BLE001  a policy's exception may raise in __str__
        return f"<its text raised {type(second).__name__}>"


def run(state: Rank, prepare: Callable[[Rank], None]) -> None:
    """Prepare, announce readiness, serve; a failure is told once, then the process waits to be ended."""
    global _current  # noqa: PLW0603  a process is one rank
    _current = state
    try:
        prepare(state)
        gc.collect()
        gc.freeze()
        state.page.enter("ready")
        state.channel.send({"event": "ready", **state.told})
        serve(state)
    except BaseException as error:  # noqa: BLE001  SystemExit and KeyboardInterrupt are a candidate's failures too
        tell_failure(state, error)
    while True:
        _await_go(state)


def request(channel: Channel) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The broker as a function: a build request goes out, the path of the result or a log comes back."""

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        channel.send({"event": "compile", "request": body})
        return channel.recv().body

    return ask


def prepare_box(config: dict[str, Any], symmetric: list[int]) -> Callable[[Rank], None]:
    """What a candidate's rank does before it is ready."""

    def prepare(state: Rank) -> None:
        from . import compile as compiler  # noqa: PLC0415
        from . import symm_mem  # noqa: PLC0415

        state.page.enter("init")
        join_group(state.rank, state.world_size, config["store"], config["group"], state.device)
        if state.device.type == "cuda":
            stay_on_one_core()
        collectives.install(state.page, staged=state.device.type == "cuda" and config["group"] == "gloo")
        compiler.connect(request(state.channel))
        compiler.install()
        if config["native"]:
            symm_mem.attach(symmetric, state.rank, state.world_size, config["native"], state.page.wait_address)
        (symm_mem.install if state.device.type == "cpu" else symm_mem.hand_over)()
        state.operations |= {control.CALL: partial(call, state), control.PROFILE: partial(profile, state)}
        state.solution = load(config["source"], state.page)

    return prepare
