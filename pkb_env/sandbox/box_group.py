"""The supervisor of a box: runs a candidate's ranks inside the walls and reports what it sees from outside.

Speaks with the evaluator: config in, then `call` and `row` orders; out come `ready`, `done` with the outside clock, `failed` with
everything known about every rank, and the ranks' build requests.
Not here: status words, verdicts, answers.
"""

from __future__ import annotations

import os
import sys
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from pkb_env.box import control
from pkb_env.box.channel import Channel, ChannelClosed
from pkb_env.box.worker import Lines
from pkb_env.sandbox import hang, limits, straggler, walls
from pkb_env.sandbox.gpu_rest import Rest
from pkb_env.sandbox.group import Group
from pkb_env.sandbox.init import own_lines
from pkb_env.sandbox.launcher import NO_MULTICAST
from pkb_env.sandbox.visible import gpu_devices

ENVIRONMENT = (
    "PATH", "LANG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
    "CUDA_HOME", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", *NO_MULTICAST,
)  # fmt: skip


@dataclass(frozen=True)
class Fds:
    """Descriptors of one box, by rank."""

    arenas: tuple[tuple[int, ...], ...]
    """Inputs and outputs; on GPUs, behind them their memory there."""
    symmetric: tuple[int, ...]


def main(upstream: Channel) -> None:
    """Serve one evaluation, then leave nothing behind."""
    first = upstream.recv()
    config, world_size = first.body, first.body["world_size"]
    from pkb_box import symm_arena  # type: ignore[import-not-found]  # noqa: PLC0415  the box's own copy

    symmetric = tuple(symm_arena.create(world_size, config["symmetric_bytes"])) if config["native"] else ()
    shared = sum(os.fstat(fd).st_size for fd in symmetric) + config["slots"] * (config["in_capacity"] + config["out_capacity"])
    config["rank_memory_bytes"] += limits.memory_in_use(reserves=bool(config["devices"])) + shared
    fds = Fds(tuple(first.fds[rank::world_size] for rank in range(world_size)), symmetric)
    rest = Rest(config["devices"])
    rest.start()
    walls.enter_namespaces(config["walls"], config["scratch"], config["disk_bytes"])
    group, gpu = Group(world_size, upstream, config["output_chars"]), gpu_devices() if config["devices"] else []
    try:
        group.start(
            lambda: walls.confine_group(config["walls"], config["read"], config["write"], gpu),
            lambda rank, lines: _rank_main(config, fds, gpu, rank, lines),
        )
        rest.ready()
        _load(group, config)
        _serve(group, rest)
    except ChannelClosed:
        pass
    finally:
        group.kill()


def _load(group: Group, config: dict[str, Any]) -> None:
    trouble = group.wait(group.all_ready, config["load_deadline_s"])
    answer = {"event": "ready"} if trouble is None else hang.report(group, "load", trouble)
    group.pause()
    group.upstream.send(answer)


def _serve(group: Group, rest: Rest) -> None:
    while True:
        body = group.upstream.recv().body
        if body["cmd"] == "memory":
            group.upstream.send({"event": "memory", "bytes": hang.peak_memory(group)})
        elif body["cmd"] == "call":
            group.upstream.send(_call(group, rest, body))
        elif body["cmd"] == "row":
            group.upstream.send(_row(group, rest, body))
        else:
            group.heard(body)


def _call(group: Group, rest: Rest, body: dict[str, Any]) -> dict[str, Any]:
    start = group.order(control.Order(body["operation"], body["slot"], body["nonce"]))
    trouble = group.wait(group.all_done, body["deadline_s"])
    if trouble is not None:
        return hang.report(group, "call", trouble)
    finished = [rank.finished_ns or 0 for rank in group.ranks]
    unrest = rest.wait()
    group.pause()
    stamps = [ns - start - group.held_ns + unrest + rank.late_ns() for ns, rank in zip(finished, group.ranks, strict=True)]
    times = [astuple(rank.page.times()) for rank in group.ranks]
    return {"event": "done", "ranks_ns": stamps, "times": times, "watched": rest.watched}


def _row(group: Group, rest: Rest, body: dict[str, Any]) -> dict[str, Any]:
    orders = [control.Order(control.CALL, slot, nonce) for slot, nonce in body["turns"]]
    row = straggler.Row(group, orders, body["late"], body["patience_s"], begins=body["begins"])
    trouble = row.run(body["deadline_s"])
    if trouble is not None:
        return hang.report(group, "call", trouble)
    rest.wait()
    group.pause()
    return {"event": "done"}


def _rank_main(config: dict[str, Any], fds: Fds, gpu: list[str], rank: int, lines: Lines) -> None:
    """Become rank `rank`: walls first, then the box's own worker; nothing of ours stays importable."""
    mine = {*fds.arenas[rank], *fds.symmetric}
    limits.close_all_but(own_lines(lines) | mine)
    limits.place(rank, config["world_size"])
    scratch = Path(config["scratch"])
    os.chdir(scratch)
    keep = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    os.environ.clear()
    os.environ.update(keep, HOME=str(scratch), TMPDIR=str(scratch), RANK=str(rank), WORLD_SIZE=str(config["world_size"]),
                      LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(config["world_size"]), **config["environment"])  # fmt: skip
    walls.confine_rank(config["walls"], config["rank_memory_bytes"], config["disk_bytes"], config["write"], gpu)
    _forget_ourselves(config["view"])
    from pkb_box import rank_main  # noqa: PLC0415

    rank_main.enter(config, rank, lines, fds.arenas[rank], list(fds.symmetric))


def _forget_ourselves(view: str) -> None:
    """Leave the standard library and the view on the path, and no module of ours loaded but `pkb_box`."""
    stdlib = {os.path.dirname(os.__file__), os.path.join(os.path.dirname(os.__file__), "lib-dynload")}
    sys.path[:] = [p for p in sys.path if os.path.realpath(p) in {os.path.realpath(s) for s in stdlib}] + [view]
    sys.path_importer_cache.clear()
    sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "__module__", "").startswith("_frozen_importlib")]
    for name in [n for n in sys.modules if n.split(".")[0] in ("pkb_env", "problems", "rewards")]:
        del sys.modules[name]
