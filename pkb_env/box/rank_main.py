"""Where a candidate's rank begins, already inside its walls."""

from __future__ import annotations

import faulthandler
import signal
import socket
from typing import Any

from . import control, worker
from .channel import Channel
from .wire import Arena


def enter(config: dict[str, Any], rank: int, lines: worker.Lines, inputs: int, outputs: int, symmetric: list[int]) -> None:
    """Attach to what the supervisor made, load the candidate, serve; never returns."""
    channel = Channel(socket.socket(fileno=lines.channel))
    channel.send({"event": "hello"})
    worker.silence(lines.output)
    worker.one_thread()
    faulthandler.enable(file=lines.dump, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=lines.dump, all_threads=True)
    state = worker.Rank(
        rank, config["world_size"], channel, control.Page(lines.control, rank), lines.go, lines.done,
        Arena(inputs, config["slots"], config["in_capacity"]), Arena(outputs, config["slots"], config["out_capacity"]),
        names=tuple(config["names"]),
    )  # fmt: skip
    worker.run(state, worker.prepare_box(config, symmetric))
