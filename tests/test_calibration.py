"""The clock recovers what is known: a delay in one rank of one side, a sleep, and the floor of a call that does nothing."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import problems
from pkb_env.boxes import SLOTS, Box, Task
from pkb_env.cancellation import Cancellation
from pkb_env.config import EvalConfig
from pkb_env.evaluator import Evaluator
from pkb_env.oracles import Oracle
from pkb_env.submission import Submission
from pkb_env.timing import Pair, summarise

TASK = Task("allreduce", problems.load("allreduce").version, 2, "tiny", "hardened", "float32")
NO_OP = "def solution(tensor):\n    return tensor\n"
PAIRS = 24


def delayed(seconds: float) -> str:
    """A call that does nothing, but rank 1 sleeps."""
    head = "import time\nimport torch.distributed as dist\n"
    return head + f"def solution(tensor):\n    time.sleep({seconds} * dist.get_rank())\n    return tensor\n"


@pytest.fixture
def oracle(evaluator: Evaluator) -> Iterator[Oracle]:
    with evaluator.machine().pool.taken(TASK, Cancellation()) as taken:
        yield taken


def boxes(evaluator: Evaluator, oracle: Oracle, sources: list[str], stack: ExitStack) -> list[Box]:
    made = []
    for source in sources:
        parts = evaluator.machine()
        box = Box(parts.zygote, parts.config, parts.folder)
        stack.callback(box.close)
        box.load(source, TASK, oracle.ready())
        box.await_ready()
        made.append(box)
    return made


def paired(evaluator: Evaluator, oracle: Oracle, sources: list[str]) -> list[Pair]:
    """(first, second) timed next to each other; the first stands for the reference."""
    with ExitStack() as stack:
        first, second = boxes(evaluator, oracle, sources, stack)
        pairs = []
        for number in range(PAIRS):
            slot, nonce = number % SLOTS, secrets.randbits(63)
            oracle.ask("fill", slot=slot, nonce=nonce, trial=number, secret="00" * 32, last=None)
            order = [first, second] if number % 2 else [second, first]
            calls = {id(box): box.call(slot, nonce) for box in order}
            one, two = calls[id(first)], calls[id(second)]
            pairs.append(Pair(one.ns, two.ns, two.skew_ns))
        return pairs


@pytest.mark.parametrize("milliseconds", [5, 20])
def test_a_delay_in_one_rank_is_recovered(evaluator: Evaluator, oracle: Oracle, milliseconds: float) -> None:
    pairs = paired(evaluator, oracle, [NO_OP, delayed(milliseconds / 1e3)])
    differences = sorted((p.candidate_ns - p.reference_ns) / 1e6 for p in pairs)
    low, median, high = differences[2], statistics.median(differences), differences[-3]
    print(f"delay {milliseconds} ms: recovered {median:.2f} ms [{low:.2f}, {high:.2f}]")
    assert 0.9 * milliseconds < median < 10 * milliseconds
    assert low < milliseconds + 1.0
    skew = statistics.median(p.skew_ns for p in pairs) / 1e6
    assert 0.5 * milliseconds < skew < 10 * milliseconds


def test_doing_nothing_reads_the_floor(evaluator: Evaluator, oracle: Oracle) -> None:
    pairs = paired(evaluator, oracle, [NO_OP, NO_OP])
    speed = summarise(pairs)
    assert speed is not None
    print(f"floor {speed.time_ms:.3f} ms, against itself {speed.speedup:.3f} [{speed.low:.3f}, {speed.high:.3f}]")
    assert speed.time_ms < 10
    assert speed.low < 2.0  # two groups of calls this short may differ by a third, by where their threads lie
    assert speed.high > 0.5


def test_a_candidate_gets_its_sleep() -> None:
    source = problems.reference_source(problems.load("allreduce"))
    sleepy = source.replace("def solution(", "def inner(") + (
        "\n\nimport time\n\n\ndef solution(tensor):\n    time.sleep(0.02)\n    return inner(tensor)\n"
    )
    with Evaluator(EvalConfig(trials=1, pairs=12)) as own:
        verdict = own.evaluate(Submission(sleepy, "allreduce", size="tiny"))
    assert verdict.correct, verdict.message
    assert verdict.time_ms is not None
    assert not verdict.faster
    print(f"slept 20 ms, reads {verdict.time_ms:.2f} ms beside {verdict.baselines['reference']:.2f} ms")
    assert verdict.time_ms > 20
    assert verdict.time_ms < 200
