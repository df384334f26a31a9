"""The store: one row per key whatever races, intact after a kill; the evaluator that answers from it."""

from __future__ import annotations

import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from verdicts import example, timed

from pkb_env import topology
from pkb_env.errors import UsageError
from pkb_env.recorded import RecordedEvaluator
from pkb_env.store import Key, Rollout, Store
from pkb_env.submission import Candidate, Submission
from rewards.verdict import Status, Verdict

ROOT = Path(__file__).parent.parent
SOURCE = "def solution(tensor):\n    return tensor\n"


def verdict_of(source: str, **changes: object) -> Verdict:
    return timed(1.5).but(digest=Candidate(source).digest, size="default", **changes)


def key_of(verdict: Verdict) -> Key:
    return Key.of(verdict, harness="0.1", config="c0ffee")


def script(code: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "PKB_NO_GYM": "1"}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, stdout=subprocess.PIPE, text=True)


def test_what_is_put_is_found_and_got(tmp_path: Path) -> None:
    store = Store(tmp_path / "new folder" / "s.db")
    verdict = verdict_of(SOURCE, message="line 1 \ud800")
    key = key_of(verdict)
    assert store.find(key) is None
    row = store.put(key, verdict, SOURCE + "# \ud800", b"\0secret")
    assert store.find(key) == verdict
    stored = store.get(row)
    assert (stored.verdict, stored.source, stored.secret, stored.key) == (verdict, SOURCE + "# \ud800", b"\0secret", key)
    assert stored.created == pytest.approx(time.time(), abs=60)
    store.close()
    assert store.find(key) == verdict
    store.close()


def test_every_part_of_the_key_separates(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.db")
    verdict = verdict_of(SOURCE)
    rows = {store.put(key_of(verdict), verdict, SOURCE, b"")}
    changes = {
        "digest": "f" * 64, "problem": "allgather", "problem_version": 2, "profile": "upstream", "size": "tiny", "world_size": 4,
        "backend": "cpp", "topology": "node", "dtype": "bfloat16", "hardware": "x", "toolchain": "y",
    }  # fmt: skip
    for name, value in changes.items():
        other = verdict.but(**{name: value})
        rows.add(store.put(key_of(other), other, SOURCE, b""))
    for key in (replace(key_of(verdict), harness="0.2"), replace(key_of(verdict), config="d")):
        rows.add(store.put(key, verdict, SOURCE, b""))
    assert len(rows) == len(changes) + 3
    store.close()


def test_the_first_verdict_of_a_key_stays(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.db")
    first = verdict_of(SOURCE)
    row = store.put(key_of(first), first, SOURCE, b"a")
    again = store.put(key_of(first), first.but(message="later"), SOURCE, b"b")
    assert again == row
    assert store.get(row).secret == b"a"
    assert len(store.search()) == 1
    store.close()


def test_infra_and_foreign_verdicts_are_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.db")
    infra = example(Status.INFRA, stage="harness")
    with pytest.raises(UsageError, match="INFRA"):
        store.put(key_of(infra), infra, "", b"")
    verdict = verdict_of(SOURCE)
    with pytest.raises(UsageError, match="does not belong"):
        store.put(replace(key_of(verdict), world_size=8), verdict, SOURCE, b"")
    with pytest.raises(UsageError, match="no verdict 7"):
        store.get(7)
    with pytest.raises(UsageError, match="no column colour"):
        store.search(colour="red")
    store.close()


def test_threads_share_a_store(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.db")
    verdicts = [verdict_of(f"{SOURCE}# {i % 5}\n") for i in range(40)]
    rows: list[int] = []
    threads = [threading.Thread(target=lambda v=v: rows.append(store.put(key_of(v), v, SOURCE, b""))) for v in verdicts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(rows) == 40
    assert len(set(rows)) == len(store.search()) == 5
    store.close()


WRITER = """
import sys
from pkb_env.store import Key, Store
from pkb_env.submission import Candidate
from rewards.verdict import Verdict

store = Store(sys.argv[1])
print("open", flush=True)
for i in range(int(sys.argv[2])):
    source = f"solution = print  # {sys.argv[3]} {i}"
    settings = ("allreduce", 1, "hardened", "tiny", 2, "torch", "cpu", Candidate(source).digest)
    verdict = Verdict("WRONG_RESULT", "judge", "", *settings)
    print(store.put(Key.of(verdict, "0.1", "c"), verdict, source, sys.argv[4].encode()), flush=True)
"""


def test_processes_race_and_nothing_is_stored_twice(tmp_path: Path) -> None:
    path = str(tmp_path / "s.db")
    writers = [script(WRITER, path, "50", "same", str(i)) for i in range(4)]
    rows = [writer.communicate(timeout=120)[0].split()[1:] for writer in writers]
    assert [writer.returncode for writer in writers] == [0] * 4
    assert rows[0] == rows[1] == rows[2] == rows[3]
    store = Store(path)
    assert len(store.search()) == 50
    store.close()


def test_a_killed_writer_leaves_an_intact_file(tmp_path: Path) -> None:
    path = str(tmp_path / "s.db")
    told: set[str] = set()
    for run in range(3):
        writer = script(WRITER, path, "100000", f"run {run}", "secret")
        assert writer.stdout is not None
        told |= {writer.stdout.readline().strip() for _ in range(60)} - {"open"}
        writer.send_signal(signal.SIGKILL)
        writer.communicate(timeout=60)
        assert writer.returncode == -signal.SIGKILL
    store = Store(path)
    kept = {str(stored.id) for stored in store.search()}
    assert len(told) == 3 * 59
    assert told <= kept
    store.close()
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()


def test_a_forked_child_writes_through_a_connection_of_its_own(tmp_path: Path) -> None:
    code = """
import os, sys
from pkb_env.store import Rollout, Store
store = Store(sys.argv[1])
store.add_rollouts([Rollout("run", 0, 0, 0, "prompt", "of the parent")])
pid = os.fork()
if pid == 0:
    store.add_rollouts([Rollout("run", 0, 0, 0, "prompt", "of the child", None, 1)])
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print([rollout.completion for rollout in store.rollouts("run")])
"""
    child = script(code, str(tmp_path / "s.db"))
    assert child.communicate(timeout=60)[0] == "['of the parent', 'of the child']\n"


def test_another_schema_or_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    newer = tmp_path / "newer.db"
    Store(newer).close()
    db = sqlite3.connect(newer)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(UsageError, match="schema 99, this version reads 1; name another file"):
        Store(newer)
    (tmp_path / "text.db").write_text("this is no database, but long enough to be read as one " * 20)
    with pytest.raises(UsageError, match="cannot be used as a store"):
        Store(tmp_path / "text.db")
    foreign = sqlite3.connect(tmp_path / "foreign.db")
    foreign.execute("CREATE TABLE things (id)")
    foreign.close()
    with pytest.raises(UsageError, match="another program's"):
        Store(tmp_path / "foreign.db")


def test_rollouts_come_back_in_order(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.db")
    verdict = verdict_of(SOURCE)
    row = store.put(key_of(verdict), verdict, SOURCE, b"")
    first = Rollout("run", step=1, group=0, turn=0, prompt="Write \ud800", completion=SOURCE, verdict=row)
    second = Rollout("run", step=1, group=0, turn=0, prompt="Write", completion="no", sample=1)
    store.add_rollouts([first, second, replace(first, run="other")])
    assert store.rollouts("run") == [first, second]
    assert store.runs() == ["run", "other"]
    assert [(rollout.completion, graded) for rollout, graded in store.graded("run")] == [(SOURCE, verdict), ("no", None)]
    store.close()


def test_a_step_that_is_repeated_replaces_what_it_left_and_a_broken_one_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.db")
    first, second = Rollout("run", 1, 0, 0, "Write", "a"), Rollout("run", 1, 0, 0, "Write", "b", sample=1)
    store.add_rollouts([first, second])
    store.add_rollouts([replace(first, completion="c")])
    assert [rollout.completion for rollout in store.rollouts("run")] == ["b", "c"]

    def broken() -> Iterator[Rollout]:
        yield replace(first, completion="d")
        raise KeyError

    with pytest.raises(KeyError):
        store.add_rollouts(broken())
    assert [rollout.completion for rollout in store.rollouts("run")] == ["b", "c"]
    store.add_rollouts([])
    store.close()


def test_any_scored_verdict_has_a_row(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.db")
    verdict = verdict_of(SOURCE)
    row = store.put(key_of(verdict), verdict, SOURCE, b"secret")
    assert store.row_of(verdict, SOURCE) == row
    invalid = Verdict(Status.INVALID, "submission", "no code", "allreduce", 1, "hardened", "tiny", 2, "torch", "cpu", "0" * 64)
    there = store.row_of(invalid, "no code")
    assert there == store.row_of(invalid, "no code") != row
    assert store.get(int(there or 0)).verdict == invalid
    assert store.row_of(invalid.but(status=Status.INFRA), "") is None
    store.close()


def test_the_recorded_evaluator_answers_with_the_newest_verdict(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.db")
    for hardware in ("old", "new"):
        verdict = verdict_of(SOURCE, hardware=hardware)
        store.put(key_of(verdict), verdict, SOURCE, b"")
    recorded = RecordedEvaluator(store)
    answers = recorded.evaluate_many([Submission(SOURCE, "allreduce"), Submission(f"Take\n```python\n{SOURCE}```", "1")])
    assert [answer.hardware for answer in answers] == ["new", "new"]
    if topology.choose(2)[0] == "cpu":
        assert recorded.evaluate(Submission(SOURCE, "allreduce", topology="auto")).hardware == "new"
    copy = pickle.loads(pickle.dumps(recorded))  # noqa: S301
    assert copy.evaluate(Submission(SOURCE, "allreduce")).hardware == "new"
    recorded.close()
    assert len(store.search()) == 2
    store.close()


def test_the_recorded_evaluator_refuses_texts_that_are_no_candidate(tmp_path: Path) -> None:
    Store(tmp_path / "s.db").close()
    recorded = RecordedEvaluator(tmp_path / "s.db")
    assert recorded.evaluate(Submission("no", "allreduce")).status is Status.INVALID
    forbidden = recorded.evaluate(Submission("S = '#include \"/x\"'\n" + SOURCE, "allreduce"))
    assert (forbidden.status, forbidden.stage) == (Status.INVALID, "screen")
    assert [finding.rule for finding in forbidden.findings] == ["foreign-include"]
    recorded.close()


def test_a_miss_is_an_error_or_unscored(tmp_path: Path) -> None:
    Store(tmp_path / "s.db").close()
    strict, lenient = RecordedEvaluator(tmp_path / "s.db"), RecordedEvaluator(tmp_path / "s.db", missing="unscored")
    with pytest.raises(UsageError, match=r"no verdict for .*problem=allreduce"):
        strict.evaluate(Submission(SOURCE, "allreduce"))
    missed = lenient.evaluate(Submission(SOURCE, "allreduce"))
    assert (missed.status, missed.digest) == (Status.INFRA, Candidate(SOURCE).digest)
    with pytest.raises(UsageError, match="did you mean 'allreduce'"):
        strict.evaluate(Submission(SOURCE, "alreduce"))
    with pytest.raises(UsageError, match="no store at"):
        RecordedEvaluator(tmp_path / "missing.db")
    strict.close()
    lenient.close()
