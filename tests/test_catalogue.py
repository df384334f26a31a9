"""The page of all problems is fresh, kin share a split, and the ladder can be climbed.

Not here: what the problems compute (`test_problems`), lazy answers counted by the command (`test_bench`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from hypothesis import given
from hypothesis import strategies as st

import problems
from pkb_env import catalogue
from pkb_env.cli import app
from pkb_env.errors import UsageError
from pkb_env.problem_set import problem_set
from problems import kinship, rungs
from problems.base import SPLITS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "PROBLEMS.md"
EVERY = problem_set("all")
NUMBERS = range(1, 88)
"""Of the public benchmark's problems."""


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def row(slug: str) -> dict[str, str]:
    """The row of a problem in the page, by column."""
    line = next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if f" | {slug} | " in line)
    return dict(zip(catalogue.COLUMNS, cells(line), strict=True))


def test_the_page_is_what_the_command_prints() -> None:
    if PAGE.read_text(encoding="utf-8") != catalogue.page(EVERY):
        pytest.fail("docs/PROBLEMS.md is stale: pkb list --markdown > docs/PROBLEMS.md", pytrace=False)


def test_a_row_by_hand() -> None:
    found = row("allreduce")
    assert (found["#"], found["family"], found["split"], found["rung"]) == ("1", "collective-primitives", "train", "1")
    assert found["points"] == "0+0+1+0+0 = 1"
    assert (found["default"], found["large"]) == ("M=512, N=512", "M=16384, N=16384")
    assert (found["sent"], found["memory"], found["FLOP"]) == ("1 MiB", "2 MiB", "131 k")
    assert 0 < int(found["tokens"]) < int(found["prompt"]) / 2


def test_the_page_has_every_problem_once_and_counts_them() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = [cells(line) for line in text.splitlines() if re.match(r"\| \d+ \| [a-z]", line)]
    assert [line[1] for line in rows] == problems.names()
    assert {len(line) for line in rows} == {len(catalogue.COLUMNS)}
    counted = {line[0]: line[1:] for line in map(cells, text.splitlines()) if line[0].startswith("rung ")}
    for number, found in problems.ladder().items():
        counts = [sum(p.split == split for p in found) for split in SPLITS]
        assert counted[f"rung {number}"] == [*(str(count or "") for count in counts), str(len(found))]


@given(st.text())
def test_pieces_make_up_the_text(text: str) -> None:
    assert "".join(catalogue.pieces(text)) == text


def test_pieces_by_hand() -> None:
    found = catalogue.pieces("return x_1 + 12345.0")
    assert found == ["return", " x", "_", "1", " +", " ", "123", "45", ".", "0"]


def test_kin_share_a_split() -> None:
    assert kinship.torn() == {}, "give all of them one split, in their problem files"


def test_torn_kin_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinship, "KIN", {"planted": (1, 10, 85), "whole": (1, 2)})
    assert kinship.torn() == {"planted": {1: "train", 10: "test", 85: "test"}}


def test_kin_are_problems_and_of_one_family_each() -> None:
    numbers = [number for group in kinship.KIN.values() for number in group]
    assert set(numbers) <= set(NUMBERS)
    assert len(numbers) == len(set(numbers))
    assert min(map(len, kinship.KIN.values())) > 1


def test_what_is_alike_shares_a_split_or_has_a_reason() -> None:
    """The second look: it knows references, and nothing of the table of kin."""
    alike = {(a.number, b.number): likeness for likeness, a, b in kinship.across_splits(EVERY) if likeness >= kinship.ALIKE}
    unexplained = {pair: f"{likeness:.2f}" for pair, likeness in alike.items() if pair not in kinship.APART}
    assert unexplained == {}, "move one of each pair to the split of the other, or say in problems.kinship.APART why not"
    assert set(kinship.APART) <= set(alike)
    assert all(len(reason) > 20 for reason in kinship.APART.values())


def test_likeness_knows_copies_and_strangers() -> None:
    balanced, wide, primitive = (problems.load(number) for number in (49, 50, 1))
    assert kinship.likeness(balanced, balanced) == 1
    assert kinship.likeness(balanced, wide) > 0.9
    assert kinship.likeness(balanced, primitive) < 0.1
    assert kinship.likeness(balanced, primitive) == kinship.likeness(primitive, balanced)


def test_splits_have_about_the_shares_that_are_wanted() -> None:
    shares = {split: sum(p.split == split for p in EVERY) / len(EVERY) for split in SPLITS}
    for split, wanted in {"train": 0.7, "validation": 0.1, "test": 0.2}.items():
        assert abs(shares[split] - wanted) < 0.08, shares


def test_the_ladder_holds_every_problem_once() -> None:
    ladder = problems.ladder()
    assert tuple(ladder) == rungs.RUNGS
    assert sorted(p.number for found in ladder.values() for p in found) == [p.number for p in EVERY]
    assert all(rungs.facts(p).points.rung == number for number, found in ladder.items() for p in found)


def test_every_rung_can_be_trained_on() -> None:
    assert all(problem_set(f"train/rung-{number}") for number in rungs.RUNGS)


def test_every_reference_communicates() -> None:
    """Else the list of collectives lacks one."""
    assert [p.slug for p in EVERY if rungs.facts(p).places < 1] == []


def test_facts_by_hand() -> None:
    facts = rungs.facts(problems.load("allreduce"))
    assert facts == rungs.Facts(4, 1, bits=False, intensity=131072 / (2 << 20), uneven=False, dynamic=False)
    assert str(facts) == "4 statements, 1 that communicate, 0.062 operations per byte, even arguments, no sizes out of tensors"


@pytest.mark.parametrize(
    ("name", "points"),
    [
        ("allreduce", rungs.Points(length=0, calls=0, maths=1, uneven=0, dynamic=0)),
        ("allgather", rungs.Points(length=0, calls=0, maths=0, uneven=0, dynamic=0)),
        ("gemm_allreduce", rungs.Points(length=0, calls=0, maths=2, uneven=0, dynamic=0)),
        ("moe_all2all_primitive", rungs.Points(length=0, calls=0, maths=0, uneven=1, dynamic=0)),
        ("moe_ep_balanced", rungs.Points(length=3, calls=1, maths=2, uneven=1, dynamic=1)),
        ("distributed_sample_sort", rungs.Points(length=3, calls=2, maths=0, uneven=1, dynamic=1)),
    ],
)
def test_points_by_hand(name: str, points: rungs.Points) -> None:
    assert rungs.facts(problems.load(name)).points == points


@pytest.mark.parametrize(("total", "rung"), [(0, 1), (1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (6, 4), (7, 5), (9, 5)])
def test_a_rung_follows_from_the_points(total: int, rung: int) -> None:
    spread = [max(0, min(most, total - before)) for most, before in ((3, 0), (2, 3), (2, 5), (1, 7), (1, 8))]
    assert rungs.Points(*spread).total == total
    assert rungs.Points(*spread).rung == rung


def test_sets_are_named_by_rung_and_by_split() -> None:
    first = problem_set("rung-1")
    assert first == tuple(problems.ladder()[1])
    assert problem_set("train/rung-1") == tuple(p for p in first if p.split == "train")
    assert problem_set(["train/rung-1", "rung-1"]) == first
    with pytest.raises(UsageError, match="no rung-9; there are rung-1, rung-2"):
        problem_set("rung-9")
    with pytest.raises(UsageError, match="names no problem"):
        problem_set("train/test")


def test_the_lines_of_the_page_climb_the_ladder() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    seen: list[str] = []

    def train(_policy: Any, env: gymnasium.Env[Any, Any]) -> None:
        seen.append(env.reset(seed=0)[1]["problem"])

    exec(code, {"problems": problems, "gymnasium": gymnasium, "policy": None, "train": train})  # noqa: S102  it is ours
    assert [(rungs.rung(problems.load(name)), problems.load(name).split) for name in seen] == [(n, "train") for n in rungs.RUNGS]


def listed(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    """Exit code, standard output and standard error of `pkb list`."""
    with pytest.raises(SystemExit) as end:
        app(["list", *arguments], prog_name="pkb")
    return (end.value.code, *capfd.readouterr())


def test_the_command_lists_rungs(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = listed(capfd, "train/rung-1", "--json")
    assert (code, [each["slug"] for each in json.loads(out)]) == (0, [p.slug for p in problem_set("train/rung-1")])
    assert {each["rung"] for each in json.loads(out)} == {1}
    _, table, _ = listed(capfd, "allreduce")
    assert [line.split()[-1] for line in table.splitlines()] == ["rung", "1"]


def test_the_command_makes_a_page_of_a_part(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = listed(capfd, "ring_attention", "--markdown")
    assert (code, out) == (0, catalogue.page(problem_set("ring_attention")))
    assert "1 problems: 0 train (0%), 0 validation (0%), 1 test (100%)." in out
    code, out, error = listed(capfd, "--markdown", "--json")
    assert (code, out, error) == (2, "", "pkb: --json and --markdown exclude each other\n")
