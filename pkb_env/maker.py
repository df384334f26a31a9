"""One maker: the trusted process that makes the inputs of one rank, on that rank's device, and puts them where boxes find them.

Not here: whom it works for (`oracle`).
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable
from typing import Any

import torch

from pkb_env import hardware
from pkb_env.answers import Answers, alike
from pkb_env.box import collectives, control, wire, worker
from pkb_env.box.channel import Channel
from pkb_env.box.setting_up import CPU, at_work, finish, join_group, one_thread, silence, use
from pkb_env.sandbox.init import own_lines
from pkb_env.sandbox.limits import close_all_but

FILLED, ANSWERED = (0, 4, 2), 5
"""Of an oracle's kinds of arenas, those that the makers put inputs into, and answers."""
_KEPT = FILLED.index(4)
_SIZING, _ANOTHER = b"the trial that only measures sizes", b"another one"
_COLD = 3
"""Times the last cache: whoever reads so much leaves nothing else in it."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _NEVER = -1, -3, 1 << 30
"""Of mallopt(3)."""
Body = dict[str, Any]


def enter(config: Body, arenas: list[int], rank: int, lines: worker.Lines) -> None:
    """Make inputs when told, until the supervisor ends this process."""
    close_all_but(own_lines(lines) | set(arenas))
    channel = Channel(socket.socket(fileno=lines.channel))
    channel.send({"event": "hello"})
    silence(lines.output)
    state = worker.Rank(rank, config["world_size"], channel, control.Page(lines.control, rank), lines.go, lines.done)
    worker.run(state, lambda s: _prepare(s, config, arenas))


def _prepare(state: worker.Rank, config: Body, arenas: list[int]) -> None:
    one_thread()
    for limit in _MMAP_THRESHOLD, _TRIM_THRESHOLD:  # makers reuse their pages: a fresh page costs more than the values on it
        ctypes.CDLL(None).mallopt(limit, _NEVER)
    state.page.enter("init")
    problem, size, dtype = task_of(config)
    maps: list[wire.Arena] = []
    gpu = config["devices"][state.rank] if config["devices"] else None
    state.device = CPU if gpu is None else torch.device("cuda", gpu)
    use(state.device)
    sweep = None if gpu is None else torch.zeros(_COLD * _gpu_cache(gpu) // 4, device=state.device)

    def make(secret: bytes, trial: int) -> tuple[Any, ...]:
        with at_work(state.device):
            return problem.make_inputs(_draw(config, dtype, secret, trial, state), size)  # type: ignore[no-any-return]

    def fill(order: control.Order) -> None:
        inputs = make(order.secret, order.trial)
        for arena in maps if order.trial % 2 else reversed(maps):  # what is written last is still in a cache
            arena.write(order.slot, order.nonce, inputs)
        if sweep is not None:
            sweep.amax()  # and so that none of it is in a GPU's; writing would leave it to be written back during the call
        finish(state.device)

    def map_arenas(order: control.Order) -> None:
        fds = [*(arenas[kind] for kind in FILLED), *state.channel.recv().fds]
        maps[:] = wire.map_arenas(fds, config["slots"], [order.nonce] * len(FILLED), gpu)
        if answers is not None:
            answers.map_arena(arenas[ANSWERED], config["slots"], order.trial)

    state.operations |= {control.MAP: map_arenas, control.FILL: fill}
    told: Body = {"cache": hardware.last_level_cache() if gpu is None else 0}
    answers = _by_reference(state, config, problem, make, maps) if "exact" in problem.unknown else None
    if answers is None:
        first = make(_SIZING, 0)
        told |= {"in": wire.tensor_bytes(first), "out": _output_bytes(state, config, problem.reference, first)}
    state.told |= told


def _gpu_cache(gpu: int) -> int:
    return int(torch.cuda.get_device_properties(gpu).L2_cache_size)


def _by_reference(
    state: worker.Rank, config: Body, problem: Any, make: Callable[[bytes, int], tuple[Any, ...]], maps: list[wire.Arena]
) -> Answers:
    """Answers of the reference itself; their group stays, and inputs may be made in it too."""
    _join(state, config)
    first = make(_SIZING, 0)
    answers = Answers(problem.reference, first)

    def answer(order: control.Order) -> None:
        with at_work(state.device):
            answers.leave(order.slot, order.nonce, maps[_KEPT].read(order.slot, order.nonce))

    state.operations[control.ANSWER] = answer
    guessable = alike(first, make(_ANOTHER, 0))
    state.told |= {"in": wire.tensor_bytes(first), "out": answers.bytes, "guessable": guessable}
    return answers


def _join(state: worker.Rank, config: Body) -> None:
    join_group(state.rank, state.world_size, config["store"])
    collectives.install(state.page, staged=state.device.type == "cuda")


def _output_bytes(state: worker.Rank, config: Body, reference: Any, inputs: tuple[Any, ...]) -> int:
    """How much the reference gives back: known only by running it once."""
    _join(state, config)
    size = wire.tensor_bytes(reference(*inputs))
    torch.distributed.destroy_process_group()
    return size


def task_of(config: Body) -> tuple[Any, Any, torch.dtype]:
    """Problem, size and dtype of an oracle's configuration."""
    import problems  # noqa: PLC0415  after sys.path is the caller's

    torch.set_num_threads(1)
    if config["pack"]:
        from problems.packs import inside  # noqa: PLC0415

        problem = inside.load(config["pack"], config["problem"], config["version"], on_gpu=bool(config["devices"]))
    else:
        problem = problems.load(config["problem"])
    return problem, problem.size(config["size"], config["profile"]), getattr(torch, config["dtype"])


def _draw(config: Body, dtype: torch.dtype, secret: bytes, trial: int, state: worker.Rank) -> Any:
    from problems.base import Draw  # noqa: PLC0415

    where = config["problem"], config["size"], trial, state.rank, config["world_size"], config["profile"]
    return Draw(secret, *where, dtype, str(state.device))
