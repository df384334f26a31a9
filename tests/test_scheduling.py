"""Where the ranks of a box run, and that a candidate cannot take more of the scheduler than it is given."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from pkb_env.evaluator import Evaluator
from pkb_env.sandbox import limits
from pkb_env.submission import Submission
from rewards.verdict import Status

INSPECTION = """
import json, os
import torch.distributed as dist

def tried(action):
    try:
        action()
        return "allowed"
    except OSError as error:
        return type(error).__name__

def solution(tensor):
    dist.barrier()
    told = {
        "cores": sorted(os.sched_getaffinity(0)),
        "policies": {tid: os.sched_getscheduler(tid) for tid in range(os.getpid(), os.getpid() + 12) if exists(tid)},
        "mine": os.sched_getscheduler(0),
        "real time": tried(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))),
        "round robin": tried(lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))),
        "parent": tried(lambda: os.sched_setscheduler(os.getppid(), os.SCHED_BATCH, os.sched_param(0))),
        "batch": tried(lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))),
        "ordinary": tried(lambda: os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))),
    }
    if dist.get_rank() == 1:
        dist.barrier()
        return tensor
    raise RuntimeError("told " + json.dumps(told))

def exists(tid):
    try:
        os.sched_getscheduler(tid)
        return True
    except OSError:
        return False
"""


@pytest.fixture(scope="module")
def told(evaluator: Evaluator) -> dict[str, Any]:
    verdict = evaluator.evaluate(Submission(INSPECTION, "allreduce", size="tiny"))
    assert verdict.status is Status.RUNTIME_ERROR
    found = re.search(r"told (\{.*\})", verdict.message)
    assert found, verdict.message
    return dict(json.loads(found.group(1)))


def test_a_rank_has_its_own_cores(told: dict[str, Any]) -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert told["cores"] == (cores[: len(cores) // 2] if len(cores) > 1 else cores)


def test_threads_of_gloo_are_batch_threads_and_the_candidates_is_not(told: dict[str, Any]) -> None:
    assert told["mine"] == os.SCHED_OTHER
    assert os.SCHED_BATCH in told["policies"].values()


@pytest.mark.parametrize(("what", "answer"), [
    ("real time", "PermissionError"), ("round robin", "PermissionError"), ("parent", "PermissionError"),
    ("batch", "allowed"), ("ordinary", "allowed"),
])  # fmt: skip
def test_what_a_candidate_may_ask_of_the_scheduler(told: dict[str, Any], what: str, answer: str) -> None:
    assert told[what] == answer


@pytest.mark.parametrize(("cores", "world_size", "wanted"), [
    ([0, 1], 2, [{0}, {1}]), ([3, 5, 8], 2, [{3}, {5, 8}]), ([0, 1, 2, 3], 1, [{0, 1, 2, 3}]), ([0, 1], 3, [None] * 3),
])  # fmt: skip
def test_cores_are_shared_out(
    cores: list[int], world_size: int, wanted: list[set[int] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: list[set[int] | None] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cores))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, given: placed.append(set(given)))
    for rank in range(world_size):
        before = len(placed)
        limits.place(rank, world_size)
        placed += [None] * (len(placed) == before)
    assert placed == wanted


def test_a_boxs_network_does_not_pace_packets() -> None:
    """In a child, whose network it is; skipped where this machine gives no name spaces."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            limits.own_namespaces()
            os.write(writer, Path("/proc/sys/net/ipv4/tcp_congestion_control").read_bytes())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader, "rb") as file:
        found = file.read().decode().strip()
    if not found:
        pytest.skip("no name spaces on this machine")
    if os.access("/proc/sys/net/ipv4/tcp_congestion_control", os.W_OK):
        assert found == "reno"
