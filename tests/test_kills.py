"""Any process of an evaluation may be killed at any moment, the caller's too: nothing stays, nobody is blamed, no record is lost.

Moments are drawn; `PKB_SEED`, which a failing test prints, draws the same ones again.
Not here: what a candidate does to itself (`test_faults`), where the harness breaks without a kill (`test_blame`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import secrets
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from leftovers import processes
from victims import PARTS, Process, of_owner, still_there, tree

from pkb_env.attempt import Attempt
from pkb_env.boxes import Box
from pkb_env.broker import Broker
from pkb_env.cancellation import Cancellation, Cancelled
from pkb_env.config import EvalConfig
from pkb_env.evaluator import Evaluator
from pkb_env.store import Store
from pkb_env.submission import Submission
from pkb_env.timed import TimedStage
from pkb_env.turns import Turns
from rewards.verdict import Status, Verdict

SEED = int(os.environ.get("PKB_SEED") or secrets.randbits(32))
CONFIG = EvalConfig(trials=2, pairs=12, time_budget_s=0.5)
GONE_S, PATIENCE_S = 5.0, 60.0
PHASES: dict[str, tuple[type, str, float]] = {
    "start": (Attempt, "run", 0.15), "compile": (Broker, "prefetched", 0.3), "load": (Box, "await_ready", 0.3),
    "run": (Box, "call", 0.02), "judge": (Turns, "judge", 0.006), "time": (TimedStage, "group", 0.3),
    "end": (Box, "close", 0.03),
}  # fmt: skip
"""Phase -> the call that begins it, and within how many seconds of it the moment lies."""
SOURCE = """import torch.distributed as dist
from pkb_box import compile_cpp
native = compile_cpp('''#include <algorithm>
#include <vector>
extern "C" int sorted_{mark}(int n) {{ std::vector<int> v(n); std::sort(v.begin(), v.end()); return v[0]; }}''')
def solution(tensor):
    dist.all_reduce(out := tensor.clone())
    return out
"""


def fresh() -> Submission:
    """A correct candidate that nobody has seen or compiled yet."""
    return Submission(SOURCE.format(mark=secrets.token_hex(8)), "allreduce", backend="cpp", size="tiny")


@dataclass
class Killer:
    """Kills one process of a part a while after it is called, once."""

    part: str
    delay_s: float
    draw: random.Random
    owner: int = field(default_factory=os.getpid)
    hit: list[Process] = field(default_factory=list)
    """The process that was killed and all that was below it then; empty when there was none."""
    _threads: list[threading.Thread] = field(default_factory=list)

    def __call__(self) -> None:
        if not self._threads:
            self._threads.append(threading.Thread(target=self._act))
            self._threads[0].start()

    def _act(self) -> None:
        time.sleep(self.delay_s)
        if there := PARTS[self.part](self.owner):
            victim = self.draw.choice(there)
            below = tree(victim)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                self.hit = below

    def finish(self) -> None:
        for thread in self._threads:
            thread.join()


def drawing(*what: object) -> random.Random:
    return random.Random(f"{SEED} {what}")  # noqa: S311  moments, not secrets


def before(owner: type, name: str, act: Callable[[], None]) -> Callable[..., object]:
    """The method, which now says when it is called."""
    honest = getattr(owner, name)

    def method(self: object, *args: object, **named: object) -> object:
        act()
        return honest(self, *args, **named)

    return method


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    """One evaluator for all; it survives everything that is killed below it, and so does its store."""
    before = of_owner(os.getpid())  # of evaluators that other tests share
    with Evaluator(CONFIG, Store(tmp_path_factory.mktemp("kills") / "store.db")) as evaluator:
        evaluator.evaluate(fresh())
        yield evaluator
    assert still_there([p for p in of_owner(os.getpid()) if p not in before], GONE_S) == []


def check_store(path: Path) -> dict[str, Verdict]:
    """Intact, every row readable, one verdict a key, no failure of the harness among them; verdicts by source."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    with contextlib.closing(Store(path)) as store:
        rows = store.search()
    assert len({row.key for row in rows}) == len(rows)
    assert all(row.verdict.status is Status.CORRECT for row in rows), [row.verdict.message for row in rows]
    return {row.source: row.verdict for row in rows}


def cases(number: int) -> list[object]:
    """So many kills: each part in turn, at a phase that is drawn."""
    names = list(PARTS) * (1 + number // len(PARTS))
    return [pytest.param(i, names[i], id=f"{names[i]}-{i}") for i in range(number)]


def kill_one(stored: Evaluator, monkeypatch: pytest.MonkeyPatch, number: int, part: str) -> bool:
    """Kill one process of a part at a drawn moment; whether there was one."""
    draw = drawing(part, number)
    phase = "compile" if "compiler" in part else draw.choice(list(PHASES))
    owner, name, within_s = PHASES[phase]
    killer = Killer(part, draw.uniform(0, within_s), draw)
    print(f"PKB_SEED={SEED}: {part}, {1e3 * killer.delay_s:.1f} ms after the beginning of {phase}")
    submission, start = fresh(), time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, before(owner, name, killer))
        verdict = stored.evaluate(submission)
        killer.finish()
    took = time.monotonic() - start - verdict.stage_s.get("queue", 0.0)
    print(f"hit {[p.name for p in killer.hit]}: {verdict.status} after {took:.2f} s, {verdict.message[:300]}")
    assert verdict.status in (Status.CORRECT, Status.INFRA), verdict.message
    assert took < PATIENCE_S
    assert still_there(killer.hit, GONE_S) == []
    again = fresh()
    assert stored.evaluate(again).correct
    assert stored.store is not None
    kept = check_store(stored.store.path)
    assert again.text in kept
    assert (submission.text in kept) == verdict.correct
    assert not verdict.correct or stored.evaluate(submission) == verdict
    return bool(killer.hit)


@pytest.mark.parametrize(("number", "part"), cases(len(PARTS)))
def test_killed_part(stored: Evaluator, monkeypatch: pytest.MonkeyPatch, number: int, part: str) -> None:
    kill_one(stored, monkeypatch, number, part)


@pytest.mark.slow
def test_many_killed_parts(stored: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = list(PARTS)
    hits = [kill_one(stored, monkeypatch, 100 + i, parts[i % len(parts)]) for i in range(30)]
    print(f"{sum(hits)} of {len(hits)} moments found somebody to kill")
    assert sum(hits) > len(hits) / 3


FUNCTION = "int f{0}() {{{{ std::vector<long> v({0}); std::sort(v.begin(), v.end()); return v[0]; }}}}"
LONG = f"""from pkb_box import compile_cpp
native = compile_cpp('''#include <algorithm>
#include <vector>
// {{mark}}
{chr(10).join(FUNCTION.format(k) for k in range(2500))}''')
def solution(tensor):
    return tensor
"""
"""Many seconds of work for a compiler."""
CALLER = """import sys
from pkb_env import EvalConfig, Evaluator, Store, Submission
with Evaluator(EvalConfig.model_validate_json(sys.argv[1]), Store(sys.argv[2])) as evaluator:
    print("go", flush=True)
    for text in sys.argv[3:]:
        evaluator.evaluate(Submission(text, "allreduce", backend="cpp", size="tiny"))
"""
EVALUATOR_S, COMMAND_S = 4.0, 5.0
"""About how long a child takes: after `go`, and as a command from its start."""


def script(store: Path, *texts: str) -> subprocess.Popen[str]:
    """A process with an evaluator and a store, ready to evaluate."""
    command = [sys.executable, "-c", CALLER, CONFIG.model_dump_json(), str(store), *texts]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "go\n"
    return child


def command(store: Path, text: str) -> subprocess.Popen[str]:
    """`pkb eval` of one candidate."""
    file = store.with_suffix(".py")
    file.write_text(text, encoding="utf-8")
    options = ["--backend", "cpp", "--size", "tiny", "--trials", "2", "--pairs", "12", "--time-budget", "0.5", "--json"]
    return subprocess.Popen(
        [sys.executable, "-m", "pkb_env.cli", "eval", "allreduce", str(file), "--store", str(store), *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end_caller(child: subprocess.Popen[str], number: int) -> None:
    """Send a caller a signal; it ends, and all that it started with it."""
    known = of_owner(child.pid)
    child.send_signal(number)
    child.communicate(timeout=PATIENCE_S)
    print(f"{[p.name for p in known]}: exit code {child.returncode}")
    assert still_there(known, GONE_S) == []
    assert of_owner(child.pid) == []


def in_use(run: Path) -> bool:
    """Whether some evaluator holds the lock of its folder."""
    with (run / "lock").open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def check_callers_store(path: Path, texts: list[str]) -> None:
    """Whoever comes next evaluates the same candidates, each of them once, and finds nothing that the one before left."""
    kept = check_store(path) if path.exists() else {}
    with Evaluator(CONFIG, Store(path)) as evaluator:
        verdicts = [evaluator.evaluate(Submission(text, "allreduce", backend="cpp", size="tiny")) for text in texts]
        runs = evaluator.machine().folder.parent
        assert [run for run in runs.iterdir() if not in_use(run)] == []
        assert not list((runs.parent / "builds").glob("build-*"))
    assert all(verdict.correct for verdict in verdicts)
    assert check_store(path) == kept | dict(zip(texts, verdicts, strict=True))


def kill_caller(folder: Path, number: int, signal_number: int) -> None:
    """End a process that evaluates at a drawn moment: one with an evaluator or, for odd numbers, a command."""
    draw, texts = drawing("caller", number, signal_number), [fresh().text for _ in range(1 if number % 2 else 3)]
    store = folder / f"{number}.db"
    child = command(store, *texts) if number % 2 else script(store, *texts)
    moment = draw.uniform(0, COMMAND_S if number % 2 else EVALUATOR_S)
    print(f"PKB_SEED={SEED}: {'a command' if number % 2 else 'an evaluator'} after {moment:.2f} s")
    time.sleep(moment)
    end_caller(child, signal_number)
    check_callers_store(store, texts)


@pytest.mark.parametrize("number", range(2))
@pytest.mark.usefixtures("stored")
def test_killed_caller(tmp_path: Path, number: int) -> None:
    kill_caller(tmp_path, number, signal.SIGKILL)


@pytest.mark.parametrize("number", range(2))
@pytest.mark.usefixtures("stored")
def test_interrupted_caller(tmp_path: Path, number: int) -> None:
    kill_caller(tmp_path, number, signal.SIGINT)


@pytest.mark.slow
@pytest.mark.usefixtures("stored")
def test_many_ended_callers(tmp_path: Path) -> None:
    for number in range(100, 112):
        kill_caller(tmp_path, number, signal.SIGKILL if number % 3 else signal.SIGINT)


def give_up(stored: Evaluator, number: int) -> None:
    """Cancel an evaluation at a drawn moment; it ends soon, and the next one is right."""
    moment = drawing("cancel", number).uniform(0, 0.8)
    print(f"PKB_SEED={SEED}: cancelled after {moment:.3f} s")

    async def begun() -> float:
        task = asyncio.create_task(stored.aevaluate(fresh()))
        await asyncio.sleep(moment)
        start = time.monotonic()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            assert (await task).correct
        return time.monotonic() - start

    assert asyncio.run(begun()) < PATIENCE_S
    assert processes("pkb-compile") == []
    assert stored.evaluate(fresh()).correct


@pytest.mark.parametrize("number", range(4))
def test_cancelled(stored: Evaluator, number: int) -> None:
    give_up(stored, number)


@pytest.mark.slow
def test_cancelled_many_times(stored: Evaluator) -> None:
    for number in range(100, 130):
        give_up(stored, number)


def working_compiler(owner: int) -> list[Process]:
    """The supervisor of a compile box and its compilers, once one of them has begun its real work."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        for pid in processes("pkb-compile", owner):
            found = tree(pid)
            if any(p.name == "cc1plus" for p in found):
                return found
        time.sleep(0.02)
    raise AssertionError("no compiler began")


def long() -> Submission:
    return Submission(LONG.format(mark=secrets.token_hex(8)), "allreduce", backend="cpp", size="tiny")


def test_a_compiler_ends_with_its_supervisor(stored: Evaluator) -> None:
    """Nobody is left who would keep its deadline."""
    cancellation = Cancellation()
    with ThreadPoolExecutor(1) as threads:
        verdict = threads.submit(stored.evaluate, long(), cancellation)
        working = working_compiler(os.getpid())
        os.kill(working[0].pid, signal.SIGKILL)
        assert still_there(working, GONE_S) == []
        working_compiler(os.getpid())  # asked for again
        cancellation.cancel()
        with pytest.raises(Cancelled):
            verdict.result()


def test_a_compiler_ends_when_its_evaluation_is_given_up(stored: Evaluator) -> None:
    cancellation = Cancellation()
    with ThreadPoolExecutor(1) as threads:
        verdict = threads.submit(stored.evaluate, long(), cancellation)
        working = working_compiler(os.getpid())
        cancellation.cancel()
        assert still_there(working, GONE_S) == []
        with pytest.raises(Cancelled):
            verdict.result(GONE_S)
