"""The process all others are forked from: it has imported torch and run no operation.

It knows no secret, no source and no problem: a request names a kind of group and carries one descriptor, over which the
new supervisor gets everything else.  It ends when its starter closes the control socket.
Not here: what a supervisor does (`box_group`, `compile_box`, `pkb_env.oracle`).
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
from pathlib import Path

from pkb_env.box.channel import Channel, ChannelClosed
from pkb_env.sandbox import visible, walls
from pkb_env.sandbox.launcher import BOX_SOURCES
from pkb_env.sandbox.limits import die_with_parent

KINDS = {
    "box": "pkb_env.sandbox.box_group", "compile": "pkb_env.sandbox.compile_box", "oracle": "pkb_env.oracle",
    "peaks": "pkb_env.peaks",
}  # fmt: skip
_LOADED_BEFORE_FORK = ("torch.distributed.distributed_c10d", "torch.distributed._symmetric_memory", "numpy")
_LOADED_FOR_GPUS = ("torch.fx.experimental.symbolic_shapes",)
"""The first tensor of torch's symmetric memory wants it: seconds, of which every box would pay."""
_OURS = ("pkb_env.sandbox.box_group", "pkb_env.sandbox.compile_box", "pkb_box.worker", "pkb_box.symm_mem", "pkb_box.compile")


def main(control_fd: int, view: str) -> None:
    """Fork a supervisor per request until the control socket closes.

    Args:
        control_fd: inherited socket to the starter, which says first what no box may read: caches, stores, other candidates.
            Every box inherits arguments and variables of this process, so it keeps no name of a place that is hidden.
        view: folder that holds `pkb_box` and links to the packages a box may import.
    """
    control = Channel(socket.socket(fileno=control_fd))
    visible.make_view(Path(view), BOX_SOURCES)
    sys.path.append(view)
    for name in (*_LOADED_BEFORE_FORK, *(_LOADED_FOR_GPUS if visible.has_gpu() else ()), *_OURS):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads in the zygote: a fork would lose them"
    held = walls.probe(gpu=visible.has_gpu())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    read = [str(path) for path in visible.read_paths([Path(path) for path in control.recv().body["hidden"]], Path(view))]
    control.send({"event": "up", "walls": held, "read": read})
    while True:
        try:
            message = control.recv()
        except ChannelClosed:
            return
        _spawn(control, message.body["kind"], message.fds[0])


def _spawn(control: Channel, kind: str, fd: int) -> None:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(fd)
        return
    try:
        die_with_parent(parent)
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(15, f"pkb-{kind}".encode(), 0, 0, 0)
        channel = Channel(socket.socket(fileno=fd))
        channel.send({"event": "hello"})
        importlib.import_module(KINDS[kind]).main(channel)
    except ChannelClosed:
        pass
    except BaseException:  # noqa: BLE001  a forked child must never return into the zygote's loop
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
