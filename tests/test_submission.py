"""From text to candidate: what is taken, what is refused, and with which words."""

from __future__ import annotations

import time
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkb_env.errors import InvalidSource
from pkb_env.submission import MAX_SOURCE_BYTES, MAX_TEXT_BYTES, Candidate, Submission, code_in, invalid, read
from rewards.verdict import Status

GOOD = "def solution(x):\n    return x\n"
FENCE = "```"


def fenced(code: str, tag: str = "python") -> str:
    return f"{FENCE}{tag}\n{code}{FENCE}\n"


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        "\ufeff" + GOOD,
        GOOD.replace("\n", "\r\n"),
        "Here it is:\n\n" + fenced(GOOD) + "\nIt adds.",
        fenced("def solution(x):\n    return 1\n") + "No, better:\n" + fenced(GOOD),
        fenced(GOOD) + "Run it like this:\n" + fenced("python run.py\n", "bash"),
        "Unclosed:\n" + fenced(GOOD).removesuffix(FENCE + "\n"),
        "Unclosed draft:\n```python\ndef solution(:\n\n```python\n" + GOOD + FENCE,
        fenced(GOOD, ""),
        "~~~py\n" + GOOD + "~~~",
        "````python\n" + GOOD + "````",
    ],
)
def test_the_candidate_is_found_in_the_text(text: str) -> None:
    assert read(text).source.replace("\r", "").strip() == GOOD.strip()


def test_code_that_holds_a_fence_in_a_string_is_taken_whole() -> None:
    source = f'"""Docs\n\n{fenced("nothing = 0")}\n"""\n{GOOD}'
    assert read(source).source == source


@pytest.mark.parametrize("definition", ["solution = print", "solution: object = print", "def f(x): ...\nsolution = f"])
def test_solution_may_be_an_assignment(definition: str) -> None:
    assert read(definition + "\n")


@pytest.mark.parametrize(
    ("text", "words", "line"),
    [
        ("", "no code", None),
        ("   \n", "no code", None),
        (fenced(""), "no code", None),
        ("I would use a ring.", "line 1", 1),
        ("def f(x):\n    return x\n", "defines no `solution`", None),
        ("import a.solution\n", "defines no `solution`", None),
        (GOOD + GOOD, "defined 2 times (lines 1, 3)", 3),
        (GOOD + "solution = 3\n", "defined 2 times", 3),
        ("async def solution(x):\n    return x\n", "async", 1),
        ("if True:\n    def solution(x):\n        return x\n", "line 2 is nested", 2),
        ("def solution(x):\n    return (\n", "line 2", 2),
        ("x = 1\nreturn x\n" + GOOD, "line 2: 'return' outside function", 2),
        ("x = 1\n\0" + GOOD, "line", 2),
        ("x = '\ud800'\n" + GOOD, "line 1: a lone surrogate", 1),
        (GOOD + f"x = {'(' * 500}{')' * 500}\n", "", None),
        (GOOD + f"x = {'-' * 100_000}1\n", "nested too deeply", None),
        ("#" * (MAX_SOURCE_BYTES + 1), f"at most {MAX_SOURCE_BYTES}", None),
        ("é" * MAX_TEXT_BYTES, f"at most {MAX_TEXT_BYTES}", None),
    ],
)
def test_what_is_no_candidate_is_refused_with_the_line(text: str, words: str, line: int | None) -> None:
    with pytest.raises(InvalidSource) as caught:
        read(text)
    assert words in str(caught.value)
    assert caught.value.stage == "submission"
    if line is not None:
        assert caught.value.line == line


def test_no_warning_leaks_and_none_becomes_an_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(GOOD + 'x = "\\d"\ny = 1 is 1\n')


def test_futures_of_the_reader_do_not_reach_the_candidate() -> None:
    assert read("def solution(x: 1 + 1):\n    return x\n")


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.characters(codec=None), max_size=200) | st.text(alphabet="`~ \ndefsolutin():=py\0\ud800", max_size=80))
def test_any_text_is_a_candidate_or_invalid(text: str) -> None:
    code_in(text)
    try:
        candidate = read(text)
    except InvalidSource:
        verdict = invalid(Submission(text, "allreduce"), 1, InvalidSource("no"))
        assert len(verdict.digest) == 64
    else:
        assert len(candidate.digest) == 64


def test_hostile_fences_cost_no_time() -> None:
    line = FENCE + "a" * 500_000 + "`"
    with pytest.raises(InvalidSource):
        read(line)


def test_an_invalid_verdict_says_where_the_text_was_meant_to_run() -> None:
    error = InvalidSource("no", stage="screen", line=3)
    verdict = invalid(Submission("x", "allreduce", "cpp", 4, size="tiny"), 7, error)
    assert (verdict.status, verdict.stage, verdict.message, verdict.problem_version) == (Status.INVALID, "screen", "no", 7)
    assert (verdict.backend, verdict.world_size, verdict.size) == ("cpp", 4, "tiny")
    assert verdict.digest == Candidate("x").digest


@pytest.mark.parametrize("shape", ["nested", "many returns"])
def test_a_text_that_expands_without_end_is_refused_before_it_does(shape: str) -> None:
    """Python's compiler copies `finally` bodies for every way out: a few kilobytes took gigabytes."""
    if shape == "nested":
        lines = ["def solution(x):"]
        for depth in range(1, 19):
            lines += [" " * depth + "try: pass", " " * depth + "finally:"]
        lines.append(" " * 19 + "return x")
    else:
        body = ["  if x: return x"] * 4000
        lines = ["def solution(x):", " try:", *body, " finally:", *(["  x = x"] * 4000)]
    start = time.process_time()
    with pytest.raises(InvalidSource, match="finally"):
        read("\n".join(lines) + "\n")
    assert time.process_time() - start < 10
    assert read("def solution(x):\n try:\n  return x\n finally:\n  print(x)\n").source
