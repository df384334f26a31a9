"""Every way a box can fail, hand-made: the status, the rank and line that are named, and what is never shown."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkb_env.outcome import Outcome, exit_text, explain
from pkb_env.told import clean
from rewards.verdict import Status, Verdict

PEER = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:36745"


def rank(number: int, **changes: Any) -> dict[str, Any]:
    """What a supervisor says of a rank that is computing in line 7."""
    return {
        "rank": number, "phase": "call", "ready": True, "done": False, "exit": None, "raised": None, "violation": None,
        "state": "R", "line": 7, "function": "solution",
        "inside": None, "collective": "", "after": "", "sequence": 0, "waits": "",
        "peak_memory_bytes": 1 << 27, "printed": "", "failed_at": None,
    } | changes  # fmt: skip


def raised(number: int, kind: Any = "ValueError", text: Any = "bad shape", at: Any = 1.0, **told: Any) -> dict[str, Any]:
    message = {"event": "raised", "phase": "call", "type": kind, "text": text, "line": 12, "function": "solution", "log": None}
    message |= told
    return rank(number, raised=message, failed_at=at, phase="raised", line=None, function=None)


def ended(number: int, code: int, at: float = 1.0, **changes: Any) -> dict[str, Any]:
    return rank(number, exit=code, failed_at=at, line=None, function=None, state="", peak_memory_bytes=None, **changes)


def explained(*ranks: dict[str, Any], stage: str = "call", trouble: str = "failed") -> Outcome:
    return explain({"event": "failed", "stage": stage, "trouble": trouble, "compiling": [], "ranks": list(ranks)}, 10.0)


FAILED = {
    "raise": ([raised(0), rank(1)], "call", Status.RUNTIME_ERROR, "rank 0, line 12 in solution(): ValueError: bad shape"),
    "raise on the last rank": ([rank(0), raised(1)], "call", Status.RUNTIME_ERROR, "rank 1, line 12"),
    "raise without text": ([raised(0, "AssertionError", "")], "call", Status.RUNTIME_ERROR, "solution(): AssertionError"),
    "system exit": ([raised(0, "SystemExit", "3")], "call", Status.RUNTIME_ERROR, "SystemExit: 3"),
    "denied fork": ([raised(0, "PermissionError", "[Errno 1] Operation not permitted")], "call", Status.RUNTIME_ERROR,
                    "PermissionError"),
    "exit": ([ended(0, 3)], "call", Status.RUNTIME_ERROR, "rank 0 ended during the call with exit 3"),
    "exit 0": ([rank(0), ended(1, 0)], "call", Status.RUNTIME_ERROR, "rank 1 ended during the call with exit 0"),
    "segfault": ([ended(0, -11)], "call", Status.RUNTIME_ERROR, "signal SIGSEGV"),
    "killed": ([ended(0, -9)], "call", Status.RUNTIME_ERROR,
               "signal SIGKILL (which is also how the kernel ends a process when memory"),
    "abort that printed": ([ended(0, -6, printed="assert failed\n")], "call", Status.RUNTIME_ERROR,
                           "it had printed: assert failed"),
    "raise at import": ([raised(0, "ImportError", "no module", function="<module>")], "load", Status.LOAD_ERROR,
                        "importing the module failed on rank 0, line 12: ImportError: no module"),
    "exit at import": ([ended(0, 1)], "load", Status.LOAD_ERROR, "rank 0 ended while the module was imported with exit 1"),
    "segfault at import": ([ended(0, -11)], "load", Status.RUNTIME_ERROR, "while the module was imported with signal SIGSEGV"),
    "compiler at import": ([raised(0, "CompileError", "failed", log="k.cpp:3: error: no")], "load", Status.COMPILE_ERROR,
                           "the compiler refused a source (rank 0, line 12 in solution()):\nk.cpp:3: error: no"),
    "compiler in a call": ([rank(0), raised(1, "CompileError", "failed", log="error")], "call", Status.COMPILE_ERROR, "rank 1"),
    "memory error": ([raised(0, "MemoryError", "")], "call", Status.OUT_OF_MEMORY, "rank 0, line 12 in solution(): MemoryError"),
    "torch's allocator": ([raised(0, "RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried to")], "call",
                          Status.OUT_OF_MEMORY, "rank 0"),
    "a device's allocator": ([raised(0, "OutOfMemoryError", "CUDA out of memory.")], "call", Status.OUT_OF_MEMORY, "capped"),
    "memory at import": ([raised(0, "RuntimeError", "std::bad_alloc")], "load", Status.OUT_OF_MEMORY, "std::bad_alloc"),
    "bad_alloc that aborts": ([ended(0, -6, printed="terminate called after throwing an instance of 'std::bad_alloc'")], "call",
                              Status.OUT_OF_MEMORY, "signal SIGABRT"),
    "violation": ([rank(0), rank(1, violation="a message that is no JSON", failed_at=1.0)], "call", Status.TAMPERED,
                  "rank 1 broke the protocol of the box: a message that is no JSON"),
    "violation after a raise": ([raised(0), rank(1, violation="a message of 9 bytes", failed_at=1.1)], "call", Status.TAMPERED,
                                "rank 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILED)
def test_a_failure(name: str) -> None:
    ranks, stage, status, words = FAILED[name]
    found = explained(*ranks, stage=stage)
    assert found.status is status
    assert words in found.message
    assert found.stage == ("compile" if status is Status.COMPILE_ERROR else "load" if stage == "load" else "run")
    assert [r.rank for r in found.ranks] == list(range(len(ranks)))


WAITING = rank(0, collective="all_reduce", sequence=3)
LATE = {
    "all compute": ([rank(0), rank(1)], "call", Status.TIMEOUT,
                    "rank 0 is at line 7 in solution(), before any collective; rank 1 is at line 7"),
    "after a collective": ([rank(0, after="barrier", sequence=2)], "call", Status.TIMEOUT, "after collective #2 barrier"),
    "in a library": ([rank(0, inside="matmul")], "call", Status.TIMEOUT, "inside matmul"),
    "stopped": ([rank(0, state="T")], "call", Status.TIMEOUT, "stopped by a signal"),
    "one waits": ([WAITING, rank(1)], "call", Status.DEADLOCK,
                  "rank 0 is at line 7 in solution(), waits in collective #3 all_reduce"),
    "all wait": ([WAITING, rank(1, collective="broadcast", sequence=3)], "call", Status.DEADLOCK,
                 "waits in collective #3 broadcast"),
    "asynchronous": ([rank(0, collective="wait for all_reduce", sequence=2)], "call", Status.DEADLOCK,
                     "waits for the result of collective #2 all_reduce"),
    "an unnamed work": ([rank(0, collective="wait for a collective")], "call", Status.DEADLOCK,
                        "waits for the result of a collective"),
    "symmetric memory": ([rank(0, waits="barrier on channel 1: waits for rank 1"), rank(1)], "call", Status.DEADLOCK,
                         "in symmetric-memory barrier on channel 1: waits for rank 1"),
    "one returned": ([rank(0, done=True), rank(1)], "call", Status.DEADLOCK, "rank 0 returned; rank 1 is at line 7"),
    "no stack": ([rank(0, line=None, function=None)], "call", Status.TIMEOUT, "is in phase call"),
    "import computes": ([rank(0, phase="load")], "load", Status.TIMEOUT, "importing the module took more than 10 s"),
    "import waits": ([WAITING, rank(1)], "load", Status.DEADLOCK, "importing the module took more than 10 s"),
}  # fmt: skip


@pytest.mark.parametrize("name", LATE)
def test_a_deadline(name: str) -> None:
    ranks, stage, status, words = LATE[name]
    found = explained(*ranks, stage=stage, trouble="deadline")
    assert found.status is status
    assert words in found.message
    assert found.stage == ("load" if stage == "load" else "run")
    assert all((r.stuck is None) == ranks[r.rank]["done"] for r in found.ranks)


def test_what_a_rank_that_returned_did_last_is_no_waiting() -> None:
    assert explained(rank(0, done=True, collective="all_reduce"), trouble="deadline").message.endswith("rank 0 returned")


def test_a_failure_just_before_the_deadline_is_a_failure() -> None:
    found = explained(raised(0), WAITING | {"rank": 1}, trouble="deadline")
    assert (found.status, "rank 0, line 12" in found.message) == (Status.RUNTIME_ERROR, True)


@pytest.mark.parametrize("ranks", [
    [raised(0, "RuntimeError", PEER, at=1.0), raised(1, at=1.1)],
    [raised(0, "RuntimeError", PEER, at=1.2), raised(1, at=1.1)],
    [raised(0, "DistBackendError", "Broken pipe", at=1.0), ended(1, -11, at=1.05)],
    [ended(0, -6, at=1.0, printed=f"terminate called: {PEER}"), raised(1, at=1.1)],
    [raised(0, at=1.3), raised(1, at=1.2)],
    [raised(0, "RuntimeError", PEER, at=1.0), rank(1, violation="garbage", failed_at=1.4)],
])  # fmt: skip
def test_the_cause_comes_before_its_consequence(ranks: list[dict[str, Any]]) -> None:
    assert "rank 1" in explained(*ranks).message


def test_what_gloo_refuses_is_a_cause() -> None:
    """Only the words for a lost peer are an echo, not all of gloo's."""
    wrong = "ProcessGroupGloo::allgather: invalid tensor size at index 0"
    found = explained(raised(0, "RuntimeError", PEER, at=1.0), raised(1, "RuntimeError", wrong, at=1.1))
    assert wrong in found.message


def test_when_all_tell_of_a_lost_peer_the_first_is_named() -> None:
    assert "rank 1" in explained(raised(0, text=PEER, at=1.2), raised(1, text=PEER, at=1.1)).message


def test_reports_say_what_each_rank_did() -> None:
    first, second, third = explained(raised(0), ended(1, -11), WAITING | {"rank": 2}).ranks
    assert (first.error, first.line, first.exit, first.stuck) == ("ValueError: bad shape", 12, None, None)
    assert (second.exit, second.error, second.stuck) == ("signal SIGSEGV", None, None)
    assert third.stuck == "is at line 7 in solution(), waits in collective #3 all_reduce"
    assert third.peak_memory_bytes == 1 << 27


@pytest.mark.parametrize(("code", "text"), [
    (0, "exit 0"), (3, "exit 3"), (-9, "signal SIGKILL"), (-200, "signal 200"), (None, "no exit"),
])  # fmt: skip
def test_exit_text(code: int | None, text: str) -> None:
    assert exit_text(code) == text


@pytest.mark.parametrize(("came", "shown"), [
    ("cannot open /home/u/.cache/pkb/runs/run-x/box-y/scratch/store", "cannot open .../store"),
    ('File "/opt/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 3', 'File ".../functional.py", line 3'),
    ("/srv/a/b.cpp:3:5: error: x", ".../b.cpp:3:5: error: x"), ("see https://pytorch.org/docs/stable/x.html", None),
    ("a/b/c and 1/2/3 and /dev/shm and //x/y", None), ("line\n\ttab", None), ("\x1b[31mred\x1b[0m\x07", "red"),
    ("a\ud800b", "a?b"),
    ("\x00\x85", ""), (None, ""), (7, ""), (["x"], ""),
])  # fmt: skip
def test_what_is_shown_is_clean(came: Any, shown: str | None) -> None:
    assert clean(came) == (came if shown is None else shown)


def test_folders_of_this_machine_are_never_shown() -> None:
    private = "/home/somebody/private/place"
    told = {"text": f"no {private}/x", "log": f"{private}/k.cpp:1: error", "function": f"{private}/f", "type": f"{private}/T"}
    for found in (
        explained(raised(0, **told)), explained(raised(0, **told | {"log": None})),
        explained(ended(0, 1, printed=f"at {private}/y")),
        explained(rank(0, violation=f"{private}/z", failed_at=1.0)),
        explained(rank(0, inside=f"{private}/i", function=f"{private}/g"), trouble="deadline"),
    ):  # fmt: skip
        assert "somebody" not in repr(found)


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(codec=None)), st.lists(st.integers(), max_size=2),
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["event", "phase", "type", "text", "line", "function", "log", "x"]), ANYTHING))
@settings(max_examples=200, deadline=None)
def test_whatever_a_rank_tells_becomes_a_verdict(told: dict[str, Any]) -> None:
    found = explained(rank(0, raised=told, failed_at=1.0) if told else raised(0))
    verdict = Verdict(found.status, found.stage, found.message, "p", 1, "hardened", "s", 1, "torch", "cpu", "d",
                      ranks=found.ranks)  # fmt: skip
    assert Verdict.from_json(verdict.to_json()) == verdict
    (found.message + repr(found.ranks)).encode()
    assert len(found.message) < 30_000


def test_an_empty_report_of_an_exception_is_one_all_the_same() -> None:
    found = explained(rank(0, raised={"event": "raised"}, failed_at=1.0))
    assert (found.status, found.message) == (Status.RUNTIME_ERROR, "solution() raised on rank 0: an exception without a name")


def test_the_same_report_gives_the_same_words() -> None:
    assert explained(raised(0), WAITING) == explained(raised(0), WAITING)
