"""`pkb bench soak`: the arithmetic on looks made by hand, the mix, the watch on real processes, and a small real run.

Not here: long runs; that is what the command is for.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from trials import tried

from pkb_env.bench import soak, soak_mix
from pkb_env.bench.soak import Ended, Footprint, Trend
from pkb_env.bench.soak_kinds import GROUPS
from pkb_env.bench.soak_watch import Watch
from pkb_env.errors import InvalidSource
from pkb_env.sandbox.launcher import OWNER
from pkb_env.submission import read
from pkb_env.unboxed import run_source
from rewards.verdict import Status

ROOT = Path(__file__).resolve().parent.parent
PROBLEMS = ("allreduce", "allgather")
IDLE = "import time; time.sleep(60)"
REST = Footprint(
    at=1.0, names=("pkb-box", *["pkb-init"] * 2, "pkb-oracle", *["pkb-rank"] * 4, "python"), strays=(),
    folders=("lock", "oracle-1", "view-1"), shared=("old",), descriptors=20, threads=2, ports=(), zygote=7,
    resident_mib={"zygote": 100.0},
)  # fmt: skip
NOTHING = replace(REST, names=(), folders=(), descriptors=9, threads=1)


def ended(number: int = 1, status: str = "CORRECT", *, kind: str = "reference", seconds: float = 1.0) -> Ended:
    return Ended(number, kind, "honest", "allreduce", ("CORRECT",), status, "", seconds)


def report(*verdicts: Ended, rests: tuple[Footprint, ...] = (REST,), after: Footprint = NOTHING) -> soak.Report:
    return soak.summarise(verdicts, rests, NOTHING, after, 30.0, 2)


def test_a_clean_run_is_clean() -> None:
    found = report(ended(1), ended(2))
    assert found.clean
    assert (found.candidates, found.per_minute, found.statuses) == (2, 4.0, {"CORRECT": 2})
    assert found.trends["MiB of zygote"] == Trend(100.0, 100.0)


def test_a_verdict_that_was_not_planted_is_wrong_and_infra_is_not_a_verdict() -> None:
    found = report(ended(1), ended(2, "DEADLOCK"), ended(3, "INFRA"))
    assert ([each.number for each in found.wrong], [each.number for each in found.infra]) == ([2], [3])
    assert not found.clean
    assert not report(ended(3, "INFRA")).clean


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("orphans", {"strays": ("pkb-rank 12",)}), ("orphans", {"names": ("python",)}), ("files", {"folders": ("box-1",)}),
        ("files", {"shared": ("new", "old")}), ("descriptors", {"descriptors": 10}), ("threads", {"threads": 2}),
        ("ports", {"ports": (4711,)}),
    ],
)  # fmt: skip
def test_what_is_left_at_the_end_is_told(field: str, change: dict[str, object]) -> None:
    found = report(ended(), after=replace(NOTHING, **change))  # type: ignore[arg-type]
    assert getattr(found, field)
    assert not found.clean


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"names": (*REST.names, "pkb-rank")}, ["pkb-rank x 1"]),
        ({"names": (*REST.names, "pkb-box", "pkb-init")}, ["pkb-box x 1", "pkb-init x 1"]),
        ({"names": ("pkb-compile",)}, ["pkb-compile x 1"]),
        ({"folders": ("box-a", "box-b", "oracle-1")}, ["folder of a box x 2"]),
        ({"names": ("python",)}, []),
    ],
)
def test_what_stands_around_between_evaluations(change: dict[str, object], told: list[str]) -> None:
    look = replace(REST, **change)  # type: ignore[arg-type]
    assert soak.surplus(look, 2) == told
    assert report(ended(), rests=(REST, look)).surplus == tuple(told)


def test_strays_between_batches_and_a_new_zygote_are_told() -> None:
    found = report(ended(), rests=(REST, replace(REST, strays=("pkb-init 3",), zygote=8)))
    assert (found.orphans, found.restarts, found.clean) == (("pkb-init 3",), 1, False)


def test_drift_compares_tenths_of_one_kind() -> None:
    first = [ended(i, kind=kind, seconds=1.0) for i, kind in enumerate("ab")]
    middle = [ended(i, kind="a", seconds=9.0) for i in range(16)]
    last = [ended(i, kind=kind, seconds=seconds) for i, (kind, seconds) in enumerate([("a", 1.5), ("c", 7.0)])]
    found = report(*first, *middle, *last)
    assert found.drifts == {"a, allreduce": Trend(1.0, 1.5)}
    assert found.drift == 1.5
    assert math.isnan(report(ended(kind="a"), *middle, ended(kind="b")).drift)
    assert soak.trend([1.0, 3.0, *[9.0] * 16, 5.0, 6.0]) == Trend(2.0, 5.5)


def test_a_mix_holds_every_kind_and_every_text_once() -> None:
    count = sum(kind.weight for kind in soak_mix.KINDS)
    planted = soak_mix.Mix(1, PROBLEMS).plant(range(1, 2 * count + 1), "/store")
    assert {each.kind.name for each in planted[:count]} == {kind.name for kind in soak_mix.KINDS}
    assert len({kind.name for kind in soak_mix.KINDS}) == len(soak_mix.KINDS)
    assert {each.kind.group for each in planted} == set(GROUPS)
    assert len({each.submission.text for each in planted}) == len(planted)
    assert not [each.kind.name for each in planted if re.search(r"@\w+@", each.submission.text)]


def test_a_seed_gives_the_same_candidates_again_also_one_alone() -> None:
    mix = soak_mix.Mix(5, PROBLEMS)
    every = mix.plant(range(1, 201), "/store")
    assert mix.plant([117], "/store") == [every[116]]
    assert soak_mix.Mix(6, PROBLEMS).plant([117], "/store") != [every[116]]


def test_only_what_must_be_invalid_is_no_candidate() -> None:
    refused = set()
    for each in soak_mix.Mix(2, PROBLEMS).plant(range(1, 161), "/store"):
        try:
            compile(read(each.submission.text).source, "candidate.py", "exec")
        except InvalidSource:
            refused.add(each.kind.name)
    assert refused == {kind.name for kind in soak_mix.KINDS if Status.INVALID in kind.expected}


@pytest.mark.parametrize(
    "name", ["importance_sampling_loss", "clip_grad_norm_ep", "physicsnemo_distributed_rfft", "fp8_allgather_params"]
)
@pytest.mark.parametrize("kind", ["off by one", "zeros"])
def test_what_must_be_wrong_is_wrong_whatever_a_problem_gives(name: str, kind: str) -> None:
    """None among the outputs, values to which one more is nothing, complex ones, eight bits."""
    (planted,) = [each for each in soak_mix.KINDS if each.name == kind]
    trial = tried(name, 2)
    answers = [run.output for run in run_source(planted.source(name), trial.inputs)]
    assert trial.summary(answers).message


def test_the_watch_finds_children_and_those_who_left() -> None:
    mark = {**os.environ, OWNER: str(os.getpid())}
    start = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {IDLE!r}], stdout=subprocess.DEVNULL).pid)"
    with subprocess.Popen([sys.executable, "-c", IDLE]) as child, Watch() as watch:
        orphan = int(subprocess.run([sys.executable, "-c", start], stdout=subprocess.PIPE, check=True, env=mark).stdout)
        try:
            below = watch.below()
            assert child.pid in below
            assert [text.split()[-1] for text in watch.strays(below)] == [str(orphan)]
            assert [text.split()[-1] for text in watch.strays({})].count(str(child.pid)) == 1
        finally:
            os.kill(orphan, 9)
            child.kill()


def pkb_soak(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    where = ("-p", "allreduce", "-p", "allgather", "--out", str(out))
    return subprocess.run(
        [sys.executable, "-m", "pkb_env.cli", "bench", "soak", *where, *arguments],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_a_small_soak_is_clean(tmp_path: Path) -> None:
    start = time.monotonic()
    done = pkb_soak(tmp_path, "--n", "60", "--seed", "4", "--slots", "3", "--pairs", "5", "--call-deadline", "2", "--json")
    print(f"60 candidates in {time.monotonic() - start:.0f} s")
    told = json.loads(done.stdout)
    found = told["report"]
    assert found["wrong"] == []
    assert found["infra"] == []
    assert (found["orphans"], found["surplus"], found["files"], found["ports"]) == ([], [], [], [])
    assert (found["descriptors"], found["threads"], found["restarts"]) == (0, 0, 0)
    assert (done.returncode, done.stderr, told["clean"]) == (0, "", True)
    assert sum(found["statuses"].values()) == 60
    assert len(found["statuses"]) > 5
    assert json.loads((tmp_path / "soak.json").read_text(encoding="utf-8")) == told


@pytest.mark.slow
def test_a_verdict_that_was_not_planted_is_told_with_its_text(tmp_path: Path) -> None:
    """An honest one that sleeps longer than the deadline."""
    mix = soak_mix.Mix(3, ("allreduce", "allgather"), timed=False)
    (slow, *_) = [each for each in mix.plant(range(1, 201), "") if each.kind.name == "slow at times"]
    done = pkb_soak(tmp_path, "--seed", "3", "--only", str(slow.number), "--pairs", "0", "--call-deadline", "0.25")
    assert done.returncode == 1, done.stderr
    told = rf"(?m)^--only {slow.number} \(slow at times, allreduce\): (DEADLOCK|TIMEOUT), planted CORRECT: "
    assert re.search(told, done.stdout)
    assert done.stderr.startswith(f"soak --seed 3, not as planted 1: --only {slow.number} ")
    assert (tmp_path / "odd" / f"{slow.number}.py").read_text(encoding="utf-8") == slow.submission.text
