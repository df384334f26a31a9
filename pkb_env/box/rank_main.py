"""Where a candidate's rank begins, already inside its walls."""

from __future__ import annotations

import faulthandler
import signal
import socket
from collections.abc import Sequence
from typing import Any

import torch

from . import control, worker
from .channel import Channel
from .setting_up import CPU, one_thread, silence, use
from .wire import map_arenas


def enter(config: dict[str, Any], rank: int, lines: worker.Lines, arenas: Sequence[int], symmetric: list[int]) -> None:
    """Attach to what the supervisor made, load the candidate, serve; never returns.

    Args:
        config: of the box.
        rank: which one.
        lines: to the supervisor.
        arenas: inputs and outputs; on a GPU, also their memory there.
        symmetric: memory files of all ranks.
    """
    channel = Channel(socket.socket(fileno=lines.channel))
    silence(lines.output)
    one_thread()
    faulthandler.enable(file=lines.dump, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=lines.dump, all_threads=True)
    gpu = config["devices"][rank] if config["devices"] else None
    state = worker.Rank(
        rank, config["world_size"], channel, control.Page(lines.control, rank), lines.go, lines.done,
        CPU if gpu is None else torch.device("cuda", gpu), names=tuple(config["names"]),
    )  # fmt: skip
    prepare = worker.prepare_box(config, symmetric)

    def attached(state: worker.Rank) -> None:
        use(state.device, config["devices"].count(gpu))
        state.inputs, state.outputs = map_arenas(arenas, config["slots"], (config["in_capacity"], config["out_capacity"]), gpu)
        prepare(state)

    channel.send({"event": "hello"})
    worker.run(state, attached)
