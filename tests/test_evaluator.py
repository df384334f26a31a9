"""The evaluator as its callers see it: verdicts, store, replay, concurrency, cancellation, and what is left afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from leftovers import Leftovers, processes

from pkb_env.cancellation import Cancellation, Cancelled
from pkb_env.config import EvalConfig
from pkb_env.errors import HarnessError, UsageError
from pkb_env.evaluator import Evaluator
from pkb_env.store import Store
from pkb_env.submission import Submission
from rewards.verdict import Status

ALL_RANKS = 6
"""Two makers, two ranks of the reference, two of the candidate."""
QUICK = EvalConfig(trials=1, pairs=0, call_deadline_s=3.0)
GOOD = """import time
import torch.distributed as dist
def solution(tensor):
    dist.all_reduce(out := tensor.clone())
    return out
"""
LOCAL = "def solution(tensor):\n    return tensor.clone()\n"
HANGS = "import time\ndef solution(tensor):\n    time.sleep(1000)\n"


@pytest.fixture(scope="module")
def quick() -> Iterator[Evaluator]:
    with Evaluator(QUICK) as evaluator:
        yield evaluator


def of(text: str, world_size: int = 2) -> Submission:
    return Submission(text, "allreduce", world_size=world_size, size="tiny")


def test_timed_verdict_is_complete() -> None:
    with Evaluator(EvalConfig(trials=1, pairs=8)) as evaluator:
        verdict = evaluator.evaluate(of(GOOD))
    assert verdict.correct
    assert verdict.passed == 1.0
    assert verdict.speedup is not None
    assert verdict.time_ms is not None
    assert set(verdict.baselines) == {"reference"}
    assert [r.rank for r in verdict.ranks] == [0, 1]
    assert all(r.peak_memory_bytes for r in verdict.ranks)
    assert {"load", "run", "time", "total"} <= set(verdict.stage_s)


def test_more_ranks_than_cores_earn_no_speed() -> None:
    cores = len(os.sched_getaffinity(0))
    with Evaluator(EvalConfig(trials=1, pairs=6)) as evaluator:
        verdict = evaluator.evaluate(of(GOOD, world_size=cores + 1))
    assert verdict.correct
    assert not verdict.comparable
    assert any("oversubscribed" in note for note in verdict.notes)


def test_order_and_duplicates_of_a_batch(quick: Evaluator) -> None:
    batch = [of(LOCAL), of(GOOD), of("no code"), of(GOOD), of(LOCAL)]
    verdicts = quick.evaluate_many(batch)
    wrong, right, invalid = Status.WRONG_RESULT, Status.CORRECT, Status.INVALID
    assert [v.status for v in verdicts] == [wrong, right, invalid, right, wrong]
    assert verdicts[1] is verdicts[3]
    assert verdicts[0] is verdicts[4]


def test_what_is_late_in_a_batch_is_unscored_and_the_rest_is_kept(tmp_path: Path) -> None:
    """One endless candidate, whose own deadline is far away, beside a good one, in a slot each."""
    endless = of("def solution(tensor):\n    while True:\n        pass\n")
    patient = QUICK.model_copy(update={"call_deadline_s": 200.0, "slots": 2})
    with Evaluator(patient, store := Store(tmp_path / "s.db")) as evaluator:
        assert evaluator.evaluate_many([of(LOCAL)], deadline_s=100.0)[0].status is Status.WRONG_RESULT
        start = time.monotonic()
        verdicts = evaluator.evaluate_many([of(GOOD), endless], deadline_s=20.0)
        assert time.monotonic() - start < 120
        assert [v.status for v in verdicts] == [Status.CORRECT, Status.INFRA]
        assert "not evaluated within 20 s" in verdicts[1].message
        assert {row.verdict.status for row in store.search()} == {Status.CORRECT, Status.WRONG_RESULT}
        assert evaluator.evaluate_many([of(GOOD + "# again\n")], deadline_s=100.0)[0].status is Status.CORRECT


def test_usage_errors_say_what_came_and_what_there_is(quick: Evaluator) -> None:
    for change, words in (
        ({"problem": "alreduce"}, ("alreduce", "allreduce")), ({"backend": "rust"}, ("rust", "cpp")),
        ({"size": "huge"}, ("huge", "tiny")), ({"topology": "moon"}, ("moon", "cpu")),
        ({"profile": "soft"}, ("soft", "hardened")),
        ({"world_size": 0}, ("0",)),
        ({"world_size": "2"}, ("'2'", "number of ranks")), ({"world_size": True}, ("True", "number of ranks")),
    ):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            quick.evaluate(Submission(**{"text": GOOD, "problem": "allreduce"} | change))
        assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_required_wall_that_is_missing_is_refused() -> None:
    evaluator = Evaluator(EvalConfig(require_walls=("moat",)))
    with pytest.raises(UsageError, match="moat"):
        evaluator.evaluate(of(GOOD))


def test_stored_verdicts_are_answered_and_replayed(tmp_path: Path) -> None:
    with Evaluator(QUICK, Store(tmp_path / "store.db")) as evaluator:
        first, again = evaluator.evaluate(of(LOCAL)), evaluator.evaluate(of(LOCAL))
        assert first == again
        stored, now = evaluator.replay(1)
    assert stored == first
    assert (now.status, now.message, now.ranks[0].index, now.ranks[0].got) == (
        first.status, first.message, first.ranks[0].index, first.ranks[0].got
    )  # fmt: skip
    with Evaluator(QUICK, Store(tmp_path / "store.db")) as other:
        assert other.evaluate(of(LOCAL)) == first


def test_secrets_differ_between_evaluations(tmp_path: Path) -> None:
    stores = [Store(tmp_path / f"{i}.db") for i in range(2)]
    for store in stores:
        with Evaluator(QUICK, store) as evaluator:
            evaluator.evaluate(of(LOCAL))
    assert stores[0].get(1).secret != stores[1].get(1).secret


def test_cancelled_half_way(quick: Evaluator) -> None:
    quick.evaluate(of(GOOD))
    before = Leftovers.now(quick)

    async def give_up() -> float:
        task = asyncio.create_task(quick.aevaluate(of(HANGS)))
        end = time.monotonic() + 60.0  # other evaluations on this machine come first
        while len(processes("pkb-rank")) <= before.boxes:
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        start = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - start

    seconds = asyncio.run(give_up())
    print(f"cancelled in {seconds:.2f} s")
    assert seconds < 10
    assert len(processes("pkb-rank")) <= before.boxes
    assert quick.evaluate(of(GOOD)).correct


SLOW = """import time
import torch.distributed as dist
def solution(tensor):
    end = time.process_time() + 1.0
    while time.process_time() < end:
        pass
    dist.all_reduce(out := tensor.clone())
    return out
"""


@pytest.mark.parametrize(("text", "status"), [(HANGS, Status.TIMEOUT), (SLOW, Status.CORRECT)])
def test_a_long_call_lets_timed_stages_go_first(quick: Evaluator, text: str, status: Status) -> None:
    """Its group stands still meanwhile, and that time is not its own: it fails or succeeds as it would alone."""
    alone: list[float] = []

    def others() -> None:
        start = time.monotonic()
        while time.monotonic() - start < 4.0 and not over.is_set():
            asked = time.monotonic()
            with quick.machine().lock.alone(lambda: None):
                alone.append(time.monotonic() - asked)
                assert all(state_of(pid) in "tTZX" for pid in processes("pkb-rank") if pid not in before)
                time.sleep(0.5)

    quick.evaluate(of(GOOD))
    before, over = set(processes("pkb-rank")), threading.Event()
    with ThreadPoolExecutor(2) as threads:
        verdict = threads.submit(quick.evaluate, of(text))
        time.sleep(0.2)
        waits = threads.submit(others)
        found = verdict.result()
        over.set()
        waits.result()
    assert found.status is status, found.message
    assert len(alone) > 1
    assert max(alone) < QUICK.call_deadline_s
    if found.correct:
        assert 900 < found.first_call_ms < 1e3 * QUICK.call_deadline_s  # type: ignore[operator]


SLOW_CPU = """import time
import torch.distributed as dist
def solution(tensor):
    end = time.process_time() + 1.2
    while time.process_time() < end:
        pass
    dist.all_reduce(out := tensor.clone())
    return out
"""


def test_time_in_which_others_go_first_is_not_the_candidates(quick: Evaluator) -> None:
    """Held for about as long as its deadline, it still has its own time."""
    quick.evaluate(of(GOOD))
    with ThreadPoolExecutor(1) as threads:
        verdict = threads.submit(quick.evaluate, of(SLOW_CPU))
        time.sleep(0.5)
        with quick.machine().lock.alone(lambda: None):
            time.sleep(QUICK.call_deadline_s)
        found = verdict.result()
    assert found.correct, found.message


def test_a_build_that_nobody_waits_for_any_more_ends() -> None:
    """A rank asks for a long build in a thread and exits: the compiler does not go on for a minute."""
    function = "int f%d() { std::vector<long> v(%d); std::sort(v.begin(), v.end()); return v[0]; }\\n"
    source = f"""import os, threading, time
from pkb_box import compile_cpp
def build():
    compile_cpp("// {os.urandom(8).hex()}\\n" + "".join("{function}" % (k, k) for k in range(2500)))
threading.Thread(target=build, daemon=True).start()
time.sleep(1)
os._exit(3)
def solution(tensor):
    return tensor
"""
    with Evaluator(QUICK) as evaluator:
        verdict = evaluator.evaluate(of(source))
        assert verdict.status is Status.LOAD_ERROR, verdict.message
        start = time.monotonic()
        with evaluator.machine().lock.alone(lambda: None):
            assert time.monotonic() - start < 5.0
        assert processes("pkb-compile") == []


def state_of(pid: int) -> str:
    """Of the kernel: T is stopped; X when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def test_cancelled_before_it_begins(quick: Evaluator) -> None:
    cancellation = Cancellation()
    cancellation.cancel()
    with pytest.raises(Cancelled):
        quick.evaluate(of(HANGS), cancellation)


def test_two_processes_side_by_side() -> None:
    script = (
        "import sys\nfrom pkb_env.config import EvalConfig\nfrom pkb_env.evaluator import Evaluator\n"
        "from pkb_env.submission import Submission\n"
        "with Evaluator(EvalConfig(trials=1, pairs=6)) as e:\n"
        "    for text in sys.argv[1:] * 2:\n"
        "        print(e.evaluate(Submission(text, 'allreduce', size='tiny')).status, flush=True)\n"
    )
    command = [sys.executable, "-c", script, GOOD, LOCAL]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        assert process.communicate(timeout=120)[0].split() == ["CORRECT", "WRONG_RESULT"] * 2
        assert process.returncode == 0


@pytest.mark.parametrize("victim", ["pkb-zygote", "pkb-oracle", "pkb-box", "pkb-init", "pkb-rank"])
def test_a_killed_part_of_the_harness_costs_nobody_a_score(victim: str) -> None:
    slow = GOOD.replace("    dist", "    time.sleep(1.0)\n    dist")
    with Evaluator(QUICK) as evaluator:
        assert evaluator.evaluate(of(GOOD)).correct
        threading.Timer(0.6, end, [victim]).start()
        hit = evaluator.evaluate(of(slow))
        print(victim, hit.status, hit.message[:200])
        assert hit.status in (Status.CORRECT, Status.INFRA)
        assert evaluator.evaluate(of(GOOD)).correct


def end(name: str) -> None:
    for pid in victims(name):
        os.kill(pid, signal.SIGKILL)


def victims(name: str) -> list[int]:
    """The zygote itself has no name of its own: it is the parent of the supervisors."""
    if name != "pkb-zygote":
        return processes(name)
    stats = [Path(f"/proc/{pid}/stat").read_text(encoding="utf-8") for pid in processes("pkb-oracle")]
    return [int(text.rsplit(")", 1)[1].split()[1]) for text in stats]


def test_nothing_survives_a_killed_caller() -> None:
    script = (
        "from pkb_env.config import EvalConfig\nfrom pkb_env.evaluator import Evaluator\n"
        "from pkb_env.submission import Submission\nimport sys\n"
        "e = Evaluator(EvalConfig(pairs=0))\nprint('go', flush=True)\n"
        "e.evaluate(Submission(sys.argv[1], 'allreduce', size='tiny'))\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", script, HANGS], stdout=subprocess.PIPE, text=True)
    limit = time.monotonic() + 60
    while len(processes("pkb-rank", caller.pid)) < ALL_RANKS and time.monotonic() < limit:
        time.sleep(0.05)
    assert len(processes("pkb-rank", caller.pid)) == ALL_RANKS
    caller.kill()
    caller.communicate()
    limit = time.monotonic() + 10
    while processes("pkb-rank", caller.pid) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(processes(name, caller.pid) for name in ("pkb-rank", "pkb-init", "pkb-box", "pkb-oracle", "python"))


def test_what_a_killed_evaluator_left_is_swept(quick: Evaluator) -> None:
    runs = quick.machine().folder.parent
    (runs / "run-of-a-dead-one").mkdir()
    with Evaluator(QUICK) as other:
        other.machine()
        assert not (runs / "run-of-a-dead-one").exists()
        assert quick.machine().folder.exists()


def test_too_many_ranks_and_an_unusable_cache_are_said_before_anything_runs(
    quick: Evaluator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="999"):
        quick.evaluate(of(GOOD, world_size=999))
    (tmp_path / "file").touch()
    monkeypatch.setenv("PKB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(HarnessError, match="PKB_CACHE"):
        Evaluator(QUICK).evaluate(of(GOOD))


def test_a_late_build_does_not_stop_the_clock() -> None:
    """A build asked for in the moment of `done` once left the next call without a deadline."""
    source = """import sys, torch.distributed as dist
def worker():
    frame = sys._getframe()
    while not hasattr(frame.f_locals.get("state"), "channel"):
        frame = frame.f_back
    return frame.f_locals["state"]
calls = []
def solution(tensor):
    calls.append(1)
    while len(calls) > 1:
        pass
    dist.all_reduce(out := tensor.clone())
    worker().channel.send({"event": "compile", "request": {"kind": "cpp", "source": "int late;", "flags": []}})
    return out
"""
    with Evaluator(EvalConfig(trials=2, pairs=0, call_deadline_s=3.0)) as evaluator:
        verdict = evaluator.evaluate(of(source))
    assert verdict.status is Status.TIMEOUT, verdict.message
    assert verdict.stage_s["run"] < 30


def test_an_output_made_in_place_beside_a_copied_one(quick: Evaluator) -> None:
    source = """import torch, torch.distributed as dist
from pkb_box import new_output
def solution(tensor):
    first = new_output(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    dist.all_reduce(first)
    new_output(*tensor.shape, dtype=tensor.dtype)
    return first.clone()
"""
    for size in ("tiny", "default"):
        verdict = quick.evaluate(Submission(source, "allreduce", size=size))
        assert verdict.correct, verdict.message
