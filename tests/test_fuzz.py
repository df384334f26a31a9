"""Whatever a policy writes or a hostile rank leaves is read in bounded time and memory, and what is shown of it tells no place.

Hypothesis draws the inputs; `--slow` draws many times as many.  `pumped` texts repeat a small part until a field is full, which
is how a pattern that takes quadratic time, or a copy for each use of a long name, shows.
Not here: trees that cross as they are (`test_wire`), hand-made failures (`test_outcome`), the order of rewards (`test_rewards`).
"""

from __future__ import annotations

import json
import math
import os
import secrets
import struct
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from verdicts import example, verdicts

import rewards
from pkb_env import kernels
from pkb_env.box import wire
from pkb_env.box.leaves import Alias
from pkb_env.box.tree import ROOM_FOR_TREE, WireViolation
from pkb_env.config import EvalConfig
from pkb_env.errors import InvalidSource
from pkb_env.evaluator import Evaluator
from pkb_env.native_text import findings_in, mechanisms_in
from pkb_env.outcome import explain
from pkb_env.prompt import MAX_SHOWN_CHARS, feedback
from pkb_env.sandbox import hang
from pkb_env.screen import MAX_FINDINGS, MAX_MESSAGE, check, mechanisms, screen
from pkb_env.source import literal_sources
from pkb_env.store import Store
from pkb_env.submission import Candidate, Submission, invalid, read
from rewards import KINDS, PRESETS, Finding, RankReport, Status, Verdict

fuzzed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
costly = settings(fuzzed, max_examples=fuzzed.max_examples // 3)
MOST_S = 3.0
"""Processor time; what is allowed takes a hundredth of it."""
MOST_BYTES = 64 << 20
SOLUTION = "\ndef solution(x):\n    return x\n"


@contextmanager
def bounded() -> Iterator[None]:
    """What is inside takes little processor time."""
    start = time.process_time()
    yield
    assert time.process_time() - start < MOST_S


def pumped(parts: st.SearchStrategy[str], most: int) -> st.SearchStrategy[str]:
    """A beginning, a small part again and again, an end: at most so many characters."""
    small = st.lists(parts, min_size=1, max_size=3).map("".join).filter(bool)
    return st.builds(lambda head, part, end: (head + part * (most // len(part)))[: most - len(end)] + end, parts, small, parts)


# ---- a policy's text --------------------------------------------------------------------------------------------------

WORDS = st.sampled_from(["torch", "os", "dist", "a", "b", "x", "setattr", "compile_cpp", "load_inline", "É", "_" * 90])
NATIVE = st.sampled_from([
    "#include <x>\n", '#include "../y"\n', "asm(", '".byte 1"', ".incbin", "/*", "*/", "//", 'R"x(', ')x"', '"', "'", "\\\n",
    "%:", "??/", "static ", "std::map<", "{", "}", ";", "\n", " ", "é", "multimem.", "fork(", "__global__ void k() {}\n",
    "(" * 9, "a",
])  # fmt: skip
LITERALS = st.one_of(
    st.text(max_size=20).map(repr), st.lists(NATIVE, max_size=8).map(lambda parts: repr("".join(parts))),
    st.just("f'{a}{b!r:>{x}}'"), WORDS, st.integers(-(10**30), 10**30).map(str), st.just("'\\ud800'"),
)  # fmt: skip
LINES = st.one_of(
    st.builds("import {} as {}".format, WORDS, WORDS), st.builds("from {}.{} import {} as {}".format, WORDS, WORDS, WORDS, WORDS),
    st.builds("{} = {} + {}".format, WORDS, LITERALS, LITERALS), st.builds("{}.{} = {}".format, WORDS, WORDS, LITERALS),
    st.builds("{}({}, {})".format, WORDS, LITERALS, LITERALS), st.builds("{}[id({})] = {}".format, WORDS, WORDS, LITERALS),
    st.builds("try:\n    {}({})\nexcept Exception:\n    pass".format, WORDS, LITERALS),
    st.builds("del {}.{}".format, WORDS, WORDS), st.builds("class {}({}.{}): pass".format, WORDS, WORDS, WORDS),
    st.builds("{} = lambda {}: {}".format, WORDS, WORDS, LITERALS), LITERALS,
    st.text("()[]{}'\"\\#:=,.`~ \n\tdefx0", max_size=12),
)  # fmt: skip


def screened(candidate: Candidate) -> None:
    """All that is read in a source before it runs."""
    found = screen(candidate, "cpp")
    assert len(found) <= MAX_FINDINGS
    assert all(len(finding.message) <= MAX_MESSAGE for finding in found)
    assert list(mechanisms(candidate)) == sorted(set(mechanisms(candidate)))
    assert all(source.kind in ("cpp", "cuda") for source in literal_sources(candidate))
    forbidden = any(finding.severity == "forbid" for finding in found)
    with pytest.raises(InvalidSource) if forbidden else nullcontext():
        check(found)


def submitted(text: str) -> None:
    """A candidate that can be screened, or INVALID with words that can be shown."""
    try:
        candidate = read(text)
    except InvalidSource as error:
        verdict = invalid(Submission(text, "allreduce"), 1, error)
        assert len(verdict.message) < MAX_SHOWN_CHARS
        feedback(verdict, text).encode()
    else:
        screened(candidate)


@fuzzed
@given(st.lists(LINES, max_size=12))
def test_any_program_is_screened_or_invalid(lines: list[str]) -> None:
    with bounded():
        submitted("\n".join(lines) + SOLUTION)


@costly
@given(st.sampled_from(["{}", "'''{}'''", "f'{}'", "a = {}", "({})", "if x:\n {}", "compile_cpp(r'''{}''')", "```\n{}\n```"]),
       pumped(LINES | st.sampled_from(["\n", ";", "{a}", "a.", "a=", "@a\n", "1,", "-", "[", "a<", "\\\n"]), 60_000))  # fmt: skip
def test_a_text_that_goes_on_and_on_is_read_in_bounded_time(form: str, text: str) -> None:
    with bounded():
        submitted(form.format(text) + SOLUTION)


@pytest.mark.parametrize("use", ["{name}.a{number}", "setattr({name}, LONG, 1)", "{name}.a{number} = LONG"])
def test_a_long_name_is_not_copied_for_each_use(use: str) -> None:
    """One alias of 100,000 characters and its uses took gigabytes; a string of that length in every finding tens of megabytes."""
    long = "a" * 100_000
    uses = "\n".join(use.format(name="t", number=number) for number in range(1000))
    candidate = read(f"import {long} as t\nimport torch\nLONG = '{long}'\n{uses}{SOLUTION}")
    tracemalloc.start()
    screened(candidate)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MOST_BYTES


def test_fields_of_a_string_are_counted_before_they_are_read() -> None:
    with bounded(), pytest.raises(InvalidSource, match="80000 opening braces"):
        read("a = f'" + "{a}" * 80_000 + "'" + SOLUTION)


@costly
@given(st.lists(NATIVE, max_size=40).map("".join) | pumped(NATIVE, 50_000))
def test_any_native_text_is_read_in_bounded_time(text: str) -> None:
    with bounded():
        found = findings_in(text, first_line=3)
        mechanisms_in(text)
    assert all(3 <= finding.line <= 3 + text.count("\n") for finding in found)


@pytest.mark.parametrize("part", ['"??/', "'", '"\\', '"\n', "/*'", 'R"(', "'\""])
def test_quotes_that_nothing_closes_cost_no_time(part: str) -> None:
    with bounded():
        findings_in("#include <x>\n" + part * (50_000 // len(part)))


# ---- what ranks leave -------------------------------------------------------------------------------------------------

SLOTS, CAPACITY, NONCE = 2, wire.capacity_for(1 << 12), 7
HEADER = struct.Struct("<QQQ")
MAGIC = 0x31_57_42_4B_50
ROOM = ROOM_FOR_TREE - HEADER.size
NODES = st.sampled_from([
    '{"v":', '{"t":["int8",[', '{"t":["int8",[4],65536]},', '{"a":["x","bool",[1],65536]},', '{"o":["float64",[2,2]]},', '{"f":"',
    '{"(":[', '{"[":[', '{"{":[["', '{"v":1},', "]}", "}", "]", ",", "65536", "9" * 99, "1e999", "-1", "null", "NaN", '"',
    "\\ud800", "\\", "\x00", "é",
])  # fmt: skip
WHOLE = st.just('{"t":["int8",[4096],65536]},')
DESCRIPTIONS = st.lists(NODES, max_size=12).map("".join) | pumped(NODES, ROOM) | pumped(WHOLE, ROOM)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, dict | list | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(part)
    elif isinstance(tree, torch.Tensor | Alias):
        yield tree.tensor if isinstance(tree, Alias) else tree


@contextmanager
def slot_with(head: bytes) -> Iterator[wire.Arena]:
    """An arena whose second slot begins with these bytes."""
    fd = wire.create_arena("fuzz")
    wire.size_arena(fd, SLOTS, CAPACITY)
    os.pwrite(fd, head, CAPACITY)
    yield wire.Arena(fd, SLOTS, CAPACITY)
    os.close(fd)


def came_of(arena: wire.Arena) -> tuple[list[torch.Tensor], str]:
    """The tensors in the second slot, or the words of a violation."""
    try:
        return list(tensors_in(arena.read(1, NONCE))), ""
    except WireViolation as violation:
        return [], str(violation)


def read_slot(head: bytes) -> None:
    """A tree whose tensors lie in the slot, or a violation; whatever the number of nodes, little memory."""
    with slot_with(head) as arena, bounded():
        arena.begin(1)
        base = arena.new([1], torch.uint8).data_ptr()
        tracemalloc.start()
        tensors, words = came_of(arena)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MOST_BYTES
        assert len(words) < 500
        for tensor in (tensor for tensor in tensors if tensor.numel()):
            assert 0 <= tensor.data_ptr() - base <= CAPACITY - ROOM_FOR_TREE - tensor.numel() * tensor.element_size()


@fuzzed
@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda rest: HEADER.pack(MAGIC, NONCE, len(rest)) + rest))
def test_any_bytes_in_a_slot_are_a_tree_or_a_violation(head: bytes) -> None:
    read_slot(head)


@fuzzed
@given(DESCRIPTIONS, st.sampled_from(["{}", '{{"[":[{}]}}', '{{"(":[{}{{"v":0}}]}}']), st.integers(-1, 1))
def test_any_text_as_a_description_is_a_tree_or_a_violation(text: str, form: str, off: int) -> None:
    described = form.format(text).encode()[:ROOM]
    read_slot(HEADER.pack(MAGIC, NONCE, min(ROOM, max(0, len(described) + off))) + described)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**500), 10**500) | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=8,
)  # fmt: skip
DUMPS = st.sampled_from([
    "Thread 0x7f (most recent call first):\n", 'File "', "/b/candidate.py", '", line ', "7", "9" * 5000, " in ", "solution",
    "wait", "<lambda>", "\n", "\x1b[31m", "/home/x/y/z", "\udcff", "é", " ", '"',
])  # fmt: skip
TOLD = st.sampled_from([
    "candidate.py, line ", "9" * 30, "9", ":", ": error: ", "k.cu(3)", "/a", "/", "\x1b[", "\x00", "\udcff", "\n", "rank 1", "a",
    "(", " ",
])  # fmt: skip
TEXTS = st.lists(TOLD, max_size=20).map("".join) | pumped(TOLD, 20_000)
KEYS = st.sampled_from(["event", "phase", "type", "text", "line", "function", "log", "x"])


@st.composite
def reports(draw: st.DrawFn) -> dict[str, Any]:
    """What a supervisor says of ranks that told, printed and left in their dumps whatever they liked."""
    return {"event": "failed", "stage": draw(st.sampled_from(["load", "call"])), "trouble": "failed", "compiling": [],
            "ranks": [draw(ranks(number)) for number in range(draw(st.integers(1, 3)))]}  # fmt: skip


def rank(number: int, **changes: Any) -> dict[str, Any]:
    """What a supervisor says of a rank that is in a call."""
    return {
        "rank": number, "phase": "call", "ready": True, "done": False, "exit": None, "raised": None, "violation": None,
        "state": "R", "line": None, "function": None, "inside": None, "collective": "", "after": "", "sequence": 0, "waits": "",
        "peak_memory_bytes": None, "printed": "", "failed_at": 1.0,
    } | changes  # fmt: skip


@st.composite
def ranks(draw: st.DrawFn, number: int) -> dict[str, Any]:
    dump = draw(st.lists(DUMPS, max_size=20).map("".join) | pumped(DUMPS, 20_000)).encode("utf-8", "replace").decode()
    place, inside = hang._stack(dump)  # noqa: SLF001  a file that the rank can write
    changes: dict[str, Any] = draw(st.sampled_from([
        {"raised": draw(st.dictionaries(KEYS, JSON | TEXTS))}, {"violation": draw(TEXTS)}, {"exit": draw(st.integers(-70, 255))},
        {"failed_at": None}, {"failed_at": None, "done": True},
    ]))  # fmt: skip
    line, function = place or (None, None)
    return rank(
        number, line=line, function=function, inside=inside, collective=draw(st.sampled_from(["", "all_reduce", "wait for ?"])),
        sequence=draw(st.integers(0, 2**32 - 1)), printed=draw(TEXTS), **changes,
    )  # fmt: skip


@fuzzed
@given(reports(), st.text(max_size=50))
def test_whatever_ranks_leave_is_an_outcome_that_can_be_shown(report: dict[str, Any], source: str) -> None:
    with bounded():
        found = explain(report, 10.0)
        verdict = example(found.status, message=found.message, stage=found.stage, ranks=found.ranks, world_size=len(found.ranks))
        shown = feedback(verdict, source)
    assert len(found.message) < 30_000
    assert len(shown) < 10 * MAX_SHOWN_CHARS
    assert Verdict.from_json(verdict.to_json()) == verdict
    (shown + found.message).encode()


@fuzzed
@given(st.lists(JSON.map(json.dumps) | st.lists(st.tuples(st.text(max_size=5), JSON, JSON)).map(json.dumps) | JSON, max_size=3))
def test_whatever_a_rank_tells_of_its_kernels_is_finite(told: list[Any]) -> None:
    found = kernels.read(told)
    assert all(math.isfinite(kernel.ms) and kernel.ms > 0 and kernel.calls > 0 for kernel in found)
    assert 0 <= (kernels.own_share(found) or 0) <= 1
    example(kernels=found).to_json()


# ---- what is shown ----------------------------------------------------------------------------------------------------

PLACES = ("/home/somebody/.cache/pkb-x/runs/run-1/candidate", "/srv/private-x/store.db", "/root/private-x/deep/notes.txt")
"""Of a cache, a store, a home folder; the last part of a path is shown, what stands before it is not."""
SECRET_PARTS = ("somebody", "private-x", "pkb-x")
AROUND = st.sampled_from(["", "'", '"', " ", "(", "=", ":", "-I", "-L", "\n", ",", "file: ", "[", "\x1b[1m", "<"])
PLANTED = st.builds(lambda before, place, after: f"{before}{place}{after}", AROUND, st.sampled_from(PLACES), AROUND)


@fuzzed
@given(PLANTED, st.sampled_from(["type", "text", "function", "log"]), st.booleans())
def test_no_place_of_ours_is_in_a_message(text: str, field: str, printed: bool) -> None:
    told = {"exit": 1, "printed": text} if printed else {"raised": {field: text}}
    found = explain({"stage": "call", "trouble": "failed", "ranks": [rank(0, **told)]}, 10.0)
    assert not any(part in found.message + repr(found.ranks) for part in SECRET_PARTS)


@fuzzed
@given(verdicts(), PLANTED, st.data())
def test_feedback_of_any_verdict_is_text_without_places_of_ours(verdict: Verdict, text: str, data: st.DataObject) -> None:
    line, output = data.draw(st.none() | st.integers()), data.draw(st.none() | st.just(0))
    planted = tuple(
        RankReport(number, "call", exit=text, stuck=text, line=line, error=text, got=text, expected=text, output=output)
        for number in range(verdict.world_size)
    )
    verdict = verdict.but(message=text, ranks=planted, notes=(text,), findings=(Finding("files", 1, "note", text),))
    shown = feedback(verdict, data.draw(st.text(st.characters(codec=None), max_size=30)))
    shown.encode()
    assert shown.strip()
    assert not any(part in shown for part in SECRET_PARTS)


TELLS = """
import gc, os, sys

def everything():
    yield repr(dict(os.environ)) + repr(sys.argv) + repr(sys.path) + os.getcwd() + repr(os.listdir("."))
    frame = sys._getframe()
    while frame is not None:
        yield repr(frame.f_locals)
        frame = frame.f_back
    for name in ("environ", "cmdline", "mountinfo", "maps", "task"):
        try:
            yield open(f"/proc/self/{name}").read()
        except OSError as error:
            yield str(error)
    for name, module in sorted(sys.modules.items()):
        if name.startswith("pkb"):
            yield name + repr({key: value for key, value in vars(module).items() if key != "__builtins__"})
    yield " ".join(each.hex() for each in gc.get_objects() if isinstance(each, bytes))

class Told(Exception):
    log = "x.cpp:1: error: " + " ".join(everything())[TOLD:TOLD + 19_000]

def solution(tensor):
    raise Told
"""


def test_a_candidate_that_tells_all_it_sees_tells_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall holds, not the filter: what a box does not see cannot be told."""
    token = secrets.token_hex(16)
    monkeypatch.setenv("PKB_TEST_TOKEN", token)
    with closing(Store(tmp_path / "secret-store.db")) as store, Evaluator(EvalConfig(trials=1, pairs=0), store) as evaluator:
        for told in range(0, 57_000, 19_000):
            verdict = evaluator.evaluate(Submission(TELLS.replace("TOLD", str(told)), "allreduce", size="tiny"))
        shown = [each.verdict.message + feedback(each.verdict, each.source) for each in store.search()]
        hidden = (token, "secret-store", *(each.secret.hex() for each in store.search()))
    assert verdict.status is Status.COMPILE_ERROR
    assert len(shown) == 3
    assert any("OMP_NUM_THREADS" in text for text in shown)
    assert not any(secret in text for text in shown for secret in hidden)


@fuzzed
@given(verdicts(), st.lists(verdicts(), max_size=3), st.sampled_from([*PRESETS, *KINDS]))
def test_a_reward_of_any_verdict_is_finite_or_unscored(verdict: Verdict, history: list[Verdict], name: str) -> None:
    reward = rewards.get(name) if name in PRESETS else rewards.Composed("one", (rewards.Part(KINDS[name]()),))
    score = reward(verdict, tuple(history))
    assume(not score.unscored)
    assert math.isfinite(score.total)
    assert all(term.score is None or math.isfinite(term.score) for term in score.terms)
