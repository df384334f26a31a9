"""The timed stage: how many pairs, which of them are judged, fresh groups for narrow claims.

The first half plays against a scripted clock, because no real machine gives times on demand; the second runs real boxes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest

import problems
from pkb_env import timing
from pkb_env.box.control import Times
from pkb_env.boxes import SLOTS, Box, Slots
from pkb_env.call import Call
from pkb_env.config import EvalConfig
from pkb_env.evaluator import Evaluator
from pkb_env.oracles import Oracle
from pkb_env.submission import Submission
from pkb_env.timed import TIMED_FROM, TimedStage
from pkb_env.turns import Turn
from rewards.verdict import Status


class Script:
    """Box, oracle and turns in one: calls take the given milliseconds on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, candidate: Iterator[float], reference: Iterator[float]) -> None:
        self.now, self.times = 0.0, {"candidate": candidate, "reference": reference}
        self.called: list[str] = []
        self.filled: list[int] = []
        self.judged: list[int] = []
        self.wrong: set[int] = set()
        monkeypatch.setattr("pkb_env.timed.time.monotonic", lambda: self.now)

    def stage(self, config: EvalConfig, seed: int = 0) -> TimedStage:
        oracle: Any = Side(self, "reference")
        turns: Any = self
        return TimedStage(config, oracle, turns, random.Random(seed))  # noqa: S311  an order, not a secret

    def box(self) -> Any:
        return Side(self, "candidate")

    def fill(self, trial: int) -> Turn:
        self.filled.append(trial)
        return Turn(trial % SLOTS, trial, trial)

    def judge(self, turn: Turn) -> bool:
        self.judged.append(turn.trial)
        return turn.trial not in self.wrong


class Side:
    """One of the two that are called."""

    def __init__(self, script: Script, name: str) -> None:
        self.script, self.name = script, name

    def call(self, slot: int, nonce: int) -> Call:
        assert slot == nonce % SLOTS
        self.script.called.append(self.name)
        milliseconds = next(self.script.times[self.name])
        self.script.now += milliseconds / 1e3
        return Call((int(milliseconds * 1e6),), (Times(0, 0, int(milliseconds * 1e6), int(milliseconds * 1e6)),))


def steady(milliseconds: float) -> Iterator[float]:
    return cycle([milliseconds])


def noisy(milliseconds: float, seed: int) -> Iterator[float]:
    rng = random.Random(seed)  # noqa: S311  noise, not a secret
    while True:
        yield milliseconds * rng.lognormvariate(0, 0.3)


CONFIG = EvalConfig(time_budget_s=3.0, judged_pairs=6)


def test_clear_pairs_end_at_the_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, candidate=steady(1), reference=steady(2))
    assert len(script.stage(CONFIG).group(script.box())) == 24


def test_unclear_pairs_go_on_until_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, candidate=noisy(1, 1), reference=noisy(1, 2))
    pairs = script.stage(CONFIG.model_copy(update={"pairs": 100, "precision": 1e-6})).group(script.box())
    assert len(pairs) == 100


def test_the_budget_ends_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, candidate=noisy(20, 1), reference=noisy(20, 2))
    pairs = script.stage(CONFIG.model_copy(update={"precision": 1e-6})).group(script.box())
    assert len(pairs) == pytest.approx(3.0 / 0.042, rel=0.3)
    assert script.now < 3.2


@pytest.mark.parametrize(("call_s", "wanted"), [(0.5, 5), (1.0, 5), (2.0, 3), (9.0, 1)])
def test_slow_calls_get_more_time_and_endless_ones_do_not(call_s: float, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, candidate=steady(call_s * 1e3), reference=steady(1))
    assert len(script.stage(CONFIG).group(script.box())) == wanted


def test_both_orders_come_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, candidate=steady(1), reference=steady(2))
    script.stage(CONFIG).group(script.box())
    firsts = script.called[::2]
    assert all({a, b} == {"candidate", "reference"} for a, b in zip(firsts[::2], firsts[1::2], strict=True))


def test_no_trial_is_shown_twice_and_none_is_an_untimed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, candidate=steady(1), reference=steady(2))
    stage = script.stage(CONFIG)
    stage.group(script.box())
    stage.group(script.box(), 0.5)
    assert script.filled == list(range(TIMED_FROM, TIMED_FROM + len(script.filled)))
    assert max(CONFIG.trials, SLOTS) <= TIMED_FROM


@pytest.mark.parametrize("seed", range(5))
def test_every_stretch_between_two_looks_is_judged(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, candidate=noisy(1, 1), reference=noisy(1, 2))
    script.stage(CONFIG.model_copy(update={"pairs": 96, "precision": 1e-6}), seed).group(script.box())
    first = TIMED_FROM + 2
    stretches = [(0, 24), (24, 36), (36, 54), (54, 80), (80, 96)]
    judged = [sum(first + a <= trial < first + b for trial in script.judged) for a, b in stretches]
    assert judged[0] >= CONFIG.judged_pairs
    assert all(found >= CONFIG.judged_pairs // 2 for found in judged[1:])


def test_which_calls_are_judged_depends_on_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = []
    for seed in (0, 1):
        script = Script(monkeypatch, candidate=steady(1), reference=steady(2))
        script.stage(CONFIG, seed).group(script.box())
        judged.append(script.judged)
    assert judged[0] != judged[1]


def test_who_burns_the_budget_is_judged_in_every_call_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, candidate=steady(400), reference=steady(1))
    pairs = script.stage(CONFIG).group(script.box())
    assert len(script.judged) >= min(len(pairs), CONFIG.judged_pairs)


def test_a_wrong_timed_call_ends_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, candidate=steady(1), reference=steady(2))
    script.wrong = set(range(TIMED_FROM, TIMED_FROM + 99))
    stage = script.stage(CONFIG)
    assert len(stage.group(script.box())) < 24
    assert not stage.right
    assert len(script.judged) == 1


def evaluated(config: EvalConfig, source: str | None = None, size: str = "tiny") -> Any:
    text = source or problems.reference_source(problems.load("allreduce"))
    with Evaluator(config) as evaluator:
        verdict = evaluator.evaluate(Submission(text, "allreduce", size=size))
    assert verdict.status is Status.CORRECT, verdict.message
    return verdict


def test_a_narrow_claim_is_repeated_in_fresh_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every claim counts as narrow here; what is seen is that there are three groups of ranks on each side, and no more."""
    boxes: list[Box] = []
    load = Box.load

    def counted(box: Box, *args: Any) -> None:
        boxes.append(box)
        load(box, *args)

    monkeypatch.setattr(timing, "needs_repeat", lambda _: True)
    monkeypatch.setattr(Box, "load", counted)
    verdict = evaluated(EvalConfig(trials=1, pairs=24))
    assert (verdict.groups, verdict.pairs) == (3, 24 + 2 * 12)
    assert len(boxes) == 6


def test_slow_calls_have_a_speed_and_no_claim() -> None:
    """A candidate cannot sleep its way out of being timed."""
    reference = problems.reference_source(problems.load("allreduce")).replace("def solution(", "def inner(")
    sleepy = reference + "\n\nimport time\n\n\ndef solution(tensor):\n    time.sleep(0.7)\n    return inner(tensor)\n"
    verdict = evaluated(EvalConfig(trials=1, time_budget_s=0.3), sleepy)
    assert 1 <= verdict.pairs < timing.MIN_PAIRS
    assert verdict.speedup < 0.2
    assert not verdict.faster
    assert any(note.startswith("few pairs") for note in verdict.notes)


@pytest.mark.parametrize(("cache", "hot"), [(1 << 40, True), (1 << 10, False), (0, False)])
def test_arguments_that_fit_the_cache_are_remarked(cache: int, hot: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Oracle.ready

    def ready(self: Oracle) -> Slots:
        slots = honest(self)
        self.cache_bytes = cache
        return slots

    monkeypatch.setattr(Oracle, "ready", ready)
    verdict = evaluated(EvalConfig(trials=1, pairs=5))
    assert any(note.startswith("cache-hot") for note in verdict.notes) == hot
