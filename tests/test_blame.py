"""Whose fault a broken harness is: nobody's score, unless it breaks with one candidate only."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from victims import PARTS

import problems
from pkb_env import oracles
from pkb_env.boxes import Box
from pkb_env.config import EvalConfig
from pkb_env.errors import HarnessError
from pkb_env.evaluator import Evaluator
from pkb_env.oracles import Oracle
from pkb_env.store import Store
from pkb_env.submission import Submission
from rewards.verdict import Status

QUICK = EvalConfig(trials=1, pairs=0, call_deadline_s=3.0)
GOOD = """import torch.distributed as dist
def solution(tensor):
    dist.all_reduce(out := tensor.clone())
    return out
"""
LOCAL = "def solution(tensor):\n    return tensor.clone()\n"
KILLS_ITSELF = """import os, signal, torch.distributed as dist
def solution(tensor):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return tensor.clone()
"""


@pytest.fixture(scope="module")
def quick() -> Iterator[Evaluator]:
    with Evaluator(QUICK) as evaluator:
        yield evaluator


def of(text: str) -> Submission:
    return Submission(text, "allreduce", size="tiny")


def test_breaking_with_everybody_is_infra(quick: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert quick.evaluate(of(GOOD)).correct
    monkeypatch.setattr(Oracle, "call", _break)
    verdict = quick.evaluate(of(GOOD))
    assert verdict.status is Status.INFRA
    assert "planted" in verdict.message


def test_infra_is_never_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Evaluator(QUICK, Store(tmp_path / "store.db")) as evaluator:
        with monkeypatch.context() as patch:
            patch.setattr(Oracle, "call", _break)
            assert evaluator.evaluate(of(GOOD)).status is Status.INFRA
        assert evaluator.evaluate(of(GOOD)).correct


def test_a_reference_that_does_not_come_up_is_nobodys_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even that of a candidate that does not come up either: the machine may be to blame for both."""
    with Evaluator(QUICK) as evaluator:
        with monkeypatch.context() as patch:
            patch.setattr(oracles, "_reference_source", lambda _: "raise RuntimeError('planted')")
            verdict = evaluator.evaluate(of("raise RuntimeError('mine')\ndef solution(tensor): ..."))
        assert verdict.status is Status.INFRA, verdict.message
        assert "planted" in verdict.message
        start = time.monotonic()
        assert evaluator.evaluate(of(GOOD)).correct
        assert time.monotonic() - start < QUICK.load_deadline_s  # nobody waited for the broken one


def test_breaking_once_is_forgiven(quick: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, calls = Oracle.call, iter([True])

    def once(self: Oracle, slot: int, nonce: int) -> object:
        if next(calls, False):
            _break()
        return honest(self, slot, nonce)

    monkeypatch.setattr(Oracle, "call", once)
    assert quick.evaluate(of(GOOD)).correct


def test_breaking_with_one_candidate_only_is_its_fault(quick: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Box.load

    def load(self: Box, source: str, *rest: object) -> None:
        if source == LOCAL:
            _break()
        honest(self, source, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Box, "load", load)
    verdict = quick.evaluate(of(LOCAL))
    assert verdict.status is Status.RUNTIME_ERROR
    assert "known-good" in verdict.message


def _break(*_: object) -> None:
    raise HarnessError("planted")


def test_the_canary_is_the_reference(quick: Evaluator) -> None:
    source = problems.reference_source(problems.load("allreduce"))
    assert quick.evaluate(of(source)).correct


def kill(part: str) -> None:
    """End every process of a part of this process's evaluations."""
    for pid in PARTS[part](os.getpid()):
        os.kill(pid, signal.SIGKILL)


def while_ready(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None], sources: tuple[str, ...] | None = None) -> None:
    """Do something whenever a box of one of these sources, or any, has come up."""
    load, ready, wanted = Box.load, Box.await_ready, set[Box]()

    def loaded(self: Box, source: str, *rest: object) -> None:
        if sources is None or source in sources:
            wanted.add(self)
        load(self, source, *rest)  # type: ignore[arg-type]

    def came_up(self: Box) -> None:
        ready(self)
        if self in wanted:
            act()

    monkeypatch.setattr(Box, "load", loaded)
    monkeypatch.setattr(Box, "await_ready", came_up)


def test_an_oracle_that_is_always_killed_is_infra(quick: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed beside the canary too, so nothing is known about the candidate."""
    with monkeypatch.context() as patch:
        while_ready(patch, lambda: kill("oracle"))
        verdict = quick.evaluate(of(LOCAL))
    assert verdict.status is Status.INFRA, verdict.message
    assert "the oracle of allreduce is gone" in verdict.message
    assert quick.evaluate(of(GOOD)).correct


def test_a_candidate_beside_which_the_oracle_always_dies_is_blamed(quick: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it does: the oracle lives beside the canary."""
    with monkeypatch.context() as patch:
        while_ready(patch, lambda: kill("oracle"), (LOCAL,))
        verdict = quick.evaluate(of(LOCAL))
    assert verdict.status is Status.RUNTIME_ERROR, verdict.message
    assert "2 times with this candidate and never with a known-good one" in verdict.message
    assert quick.evaluate(of(GOOD)).correct


def test_a_rank_that_is_killed_once_is_forgiven_and_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = iter([True])
    while_ready(monkeypatch, lambda: kill("rank") if next(first, False) else None, (GOOD,))
    with Evaluator(EvalConfig(trials=1, pairs=12, time_budget_s=0.5)) as evaluator:
        verdict = evaluator.evaluate(of(GOOD))
    assert verdict.correct, verdict.message
    assert not verdict.faster
    assert any(note.startswith("again: ") for note in verdict.notes)


def test_a_rank_that_kills_itself_each_time_is_blamed(quick: Evaluator) -> None:
    verdict = quick.evaluate(of(KILLS_ITSELF))
    assert verdict.status is Status.RUNTIME_ERROR, verdict.message
    assert "rank 1 ended during the call with signal SIGKILL" in verdict.message


def test_when_memory_runs_out_the_kernel_ends_a_rank_first(quick: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, set[str]] = {}

    def look() -> None:
        for part, pids in PARTS.items():
            found[part] = {Path(f"/proc/{pid}/oom_score_adj").read_text(encoding="ascii").strip() for pid in pids(os.getpid())}

    while_ready(monkeypatch, look, (GOOD,))
    assert quick.evaluate(of(GOOD)).correct
    ours = Path("/proc/self/oom_score_adj").read_text(encoding="ascii").strip()
    assert found["rank"] == {"1000"}
    assert found["maker"] == found["oracle"] == found["zygote"] == found["supervisor of the box"] == {ours}
