"""What every rank of a fresh launch runs: the least that the public way does for one source.

    python -m torch.distributed.run --standalone --nproc-per-node=W launched.py TASK.json

Inputs from the seeds, `solution` once, outputs into a file of this rank; with `calls` also warm-up and timed calls after it.
Stamps are on the clock that all processes of a machine share.
Not here: starting it, comparing the files (`launches`).
"""

from __future__ import annotations

# ruff: noqa: E402  the first stamp is taken before the imports that it is about
import time

_stamps = {"begun": time.monotonic()}

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import problems
from problems.base import Draw


def main() -> None:
    """Read the task, do it, write outputs and stamps."""
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    _stamps["imported"] = time.monotonic()
    device = _joined(task["group"], on_gpus=task["on_gpus"])
    _stamps["joined"] = time.monotonic()
    solution, arguments = _solution(task["source"]), _arguments(task, device)
    folder, rank = Path(task["folder"]), dist.get_rank()
    torch.save(solution(*arguments), folder / f"rank_{rank}.pt")
    mean_ms = _time(solution, arguments, task["warm_up"], task["calls"])
    _stamps["ran"] = time.monotonic()
    (folder / f"rank_{rank}.json").write_text(json.dumps({"stamps": _stamps, "mean_ms": mean_ms}), encoding="utf-8")
    dist.destroy_process_group()


def _joined(group: str, *, on_gpus: bool) -> str:
    """The device of this rank, once it is in its group."""
    if not on_gpus:
        dist.init_process_group(group)
        return "cpu"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(group, device_id=device if group == "nccl" else None)
    return str(device)


def _solution(path: str) -> Any:
    names: dict[str, Any] = {"__name__": "solution"}
    exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), names)  # noqa: S102  a trusted source of ours
    return names["solution"]


def _arguments(task: dict[str, Any], device: str) -> tuple[Any, ...]:
    problem = problems.load(task["problem"])
    draw = Draw(
        secret=bytes.fromhex(task["secret"]), problem=task["problem"], size=task["size"], trial=task["trial"],
        rank=dist.get_rank(), world_size=int(os.environ["WORLD_SIZE"]), profile=task["profile"],
        dtype=getattr(torch, task["dtype"]), device=device,
    )  # fmt: skip
    with torch.device(device):
        return problem.make_inputs(draw, problem.size(task["size"], task["profile"]))


def _time(solution: Any, arguments: tuple[Any, ...], warm_up: int, calls: int) -> float | None:
    """Mean ms of `calls` calls on one set of arguments, after `warm_up` untimed ones."""
    if not calls:
        return None
    for _ in range(warm_up):
        solution(*arguments)
    dist.barrier()
    _finish()
    start = time.perf_counter()
    for _ in range(calls):
        solution(*arguments)
    _finish()
    return (time.perf_counter() - start) / calls * 1e3


def _finish() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
