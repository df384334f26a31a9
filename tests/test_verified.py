"""Verified data: the generator is pure, what is meant to be right is, what is stored was earned, and a killed run goes on.

Not here: whether anything is learnt from it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest

import problems
from pkb_env.screen import screen
from pkb_env.store import Store
from pkb_env.submission import read
from training import verified
from training.candidates import compiling, drafts
from training.candidates.choice import Choice
from training.candidates.drafts import FAMILIES, Draft, normal
from training.candidates.sketch import Family, Flaw, Sketch, fact

ROOT = Path(__file__).resolve().parent.parent
QUICK = ("--size", "tiny", "--pairs", "0", "--trials", "2")
EACH = [(family, problem) for family in FAMILIES for problem in family.problems]


def first(count: int, backend: str, seed: int = 0) -> list[Draft]:
    return list(islice(drafts.drafts(drafts.problems(backend), backend, seed), count))


@pytest.mark.parametrize("backend", verified.BACKENDS)
def test_a_seed_decides_everything(backend: str) -> None:
    assert first(60, backend) == first(60, backend)
    assert not {d.text for d in first(60, backend)} & {d.text for d in first(60, backend, seed=1)}


def test_a_number_is_the_same_candidate_whatever_else_is_wanted() -> None:
    alone = {d.number: d for d in islice(drafts.drafts(["allreduce"], "cpp", 0), 40)}
    among = [d for d in first(40, "cpp") if d.problem == "allreduce"]
    assert [alone[d.number] for d in among] == among


@pytest.mark.parametrize(("family", "problem"), EACH, ids=[f"{f.backend}-{p}" for f, p in EACH])
def test_every_family_is_accepted_and_nothing_in_it_is_suspicious(family: Family, problem: str) -> None:
    assert problems.load(problem).split == "train"
    for number in range(12):
        sketch = family.write(Choice(f"{number}"), problem)
        candidate = read(f"```python\n{sketch.code()}```")
        assert not [f for f in screen(candidate, family.backend) if f.severity != "note"]
        assert not re.search(r"@\w+@", sketch.code() + "".join(sketch.told()))
        assert len({sketch.code(flaw) for flaw in sketch.flaws} | {sketch.code()}) == len(sketch.flaws) + 1 > 5


def test_texts_are_no_copies() -> None:
    for backend in verified.BACKENDS:
        assert len({normal(d.code) for d in first(200, backend)}) == 200
    assert normal("a = 1  # one\nb = f(2)\n") == normal("a=1\n\nb =  f( 2 )  // two") != normal("a = 1\nb = f(3)")


def test_what_is_said_of_a_mistaken_program_is_true_of_it() -> None:
    flaw = Flaw("none", "WRONG_RESULT", {"wait": ""})
    sketch = Sketch("first\n  @wait@\nlast", {"wait": "wait()"}, (fact("It waits.", "wait"), fact("It has two lines.")), (flaw,))
    assert (sketch.code(), sketch.told()) == ("first\n  wait()\nlast\n", ["It waits.", "It has two lines."])
    assert (sketch.code(flaw), sketch.told(flaw)) == ("first\nlast\n", ["It has two lines."])


@pytest.mark.parametrize("name", ["reducescatter", "all", "test", "validation", "vocab_parallel_cross_entropy_loss"])
def test_other_splits_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verified.main(["--out", str(tmp_path / "d.db"), "--problems", "allreduce", name]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "only problems of the training split may become data" in said
    assert not (tmp_path / "d.db").exists()


def test_a_problem_without_candidates_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verified.main(["--out", str(tmp_path / "d.db"), "--problems", "moe_pre_all2all"]) == 2
    assert "there are no candidates in cpp for moe_pre_all2all; there are for allreduce, " in capsys.readouterr().err


def contents(path: Path) -> tuple[dict[tuple[str, int, int], tuple[str, int | None]], int]:
    """Texts and rows of verdicts by place, and the number of all verdicts."""
    with closing(Store(path)) as store:
        rows = [r for run in store.runs() for r in store.rollouts(run)]
        places = {(r.run, r.group, r.sample): (r.completion, r.verdict) for r in rows}
        assert len(places) == len(rows)
        return places, len(store.search())


def test_right_and_mistaken_candidates_earn_their_verdicts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "d.db"
    order = ("--out", str(path), "--problems", "allreduce", "broadcast", "--seed", "32", *QUICK)
    assert verified.main([*order, "-n", "8"]) == 0
    table = capsys.readouterr().out
    places, count = contents(path)
    assert len(places) == count == 8
    with closing(Store(path)) as store:
        graded = store.graded("verified")
        by_text = {d.text: d for d in islice(drafts.drafts(["allreduce", "broadcast"], "cpp", 32), 20)}
        for rollout, verdict in graded:
            draft = by_text[rollout.completion]
            assert verdict is not None
            assert verdict.correct == (not draft.flaw)
            assert (rollout.group, rollout.step) == (problems.load(draft.problem).number, 32)
            assert verdict.status.value == "INVALID" or read(rollout.completion).digest == verdict.digest
        assert {verdict.problem for _, verdict in graded if verdict} == {"allreduce", "broadcast"}
    assert 0 < sum(bool(by_text[text].flaw) for text, _ in places.values()) < 8
    assert verified.main([*order, "-n", "8"]) == 0  # all of it is there
    assert contents(path) == (places, count)
    assert capsys.readouterr().out.partition("family")[2] == table.partition("family")[2]
    assert verified.main([*order, "-n", "8", "--size", "odd"]) == 2
    assert "holds another text or prompt for seed 32" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    path, environment = tmp_path / "d.db", {**os.environ, "PYTHONPATH": str(ROOT)}
    order = ["--out", str(path), "--problems", "allgather", "gather", "--backend", "torch", "--seed", "3", "-n", "6", *QUICK]
    with subprocess.Popen([sys.executable, "-m", "training.verified", *order], cwd=ROOT, env=environment, stdout=-3) as killed:
        while not (path.exists() and contents(path)[0]):
            time.sleep(0.1)
        killed.send_signal(signal.SIGKILL)
    before, _ = contents(path)
    assert verified.main(order) == 0
    after, count = contents(path)
    assert 0 < len(before) < len(after) == count == 6
    assert before.items() <= after.items()


def test_a_right_one_that_fails_is_an_error_and_a_mistake_that_passes_is_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, right = "def solution(tensor):\n    return tensor.clone()\n", problems.reference_source(problems.load("allreduce"))

    def planted(*_: object) -> Iterator[Draft]:
        for number, (flaw, code) in enumerate((("", wrong), ("a race", right))):
            yield Draft(number, "none", "torch", "allreduce", flaw, "CORRECT", code, f"Mine:\n```python\n{code}```\n")

    monkeypatch.setattr(drafts, "drafts", planted)
    order = ["--out", str(tmp_path / "d.db"), "--problems", "allreduce", "--backend", "torch", "-n", "2", *QUICK]
    assert verified.main(order) == verified.main(order) == 1
    said = capsys.readouterr().out.partition("meant to be right, but WRONG_RESULT: ")[2]
    assert f"Mine:\n```python\n{wrong}```\n\n" in said
    assert list(contents(tmp_path / "d.db")[0]) == [("verified", 1001, 0), ("escaped", 1001, 1)]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_cuda_is_compiled_where_it_cannot_be_run() -> None:
    found = {draft.flaw: draft for draft in first(80, "cuda")}
    assert compiling.compiled(found[""]).status == "COMPILED"
    failed = compiling.compiled(found["missing brace"])
    assert failed.status == "COMPILE_ERROR"
    assert "error" in failed.message
    assert compiling.compiled(found["missing colon"]).status == "INVALID"
