"""`pkb bench`: the arithmetic on readings made by hand, the load meter on real processes, and one tiny real run of each command.

Not here: whether this machine meets the targets; that is what the command is for.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verdicts import example, timed

from pkb_env import backends
from pkb_env.bench import examples, latency, lazy, null, texts, throughput
from pkb_env.bench.examples_run import Plan as ExamplesPlan
from pkb_env.bench.lazy_run import ANSWERS
from pkb_env.bench.lazy_run import Plan as LazyPlan
from pkb_env.bench.null_run import Notebook, Plan, take
from pkb_env.config import EvalConfig
from pkb_env.errors import UsageError
from pkb_env.evaluator import Evaluator
from pkb_env.load import Meter, Others
from pkb_env.problem_set import problem_set
from pkb_env.submission import Candidate, Submission, read
from rewards.verdict import Status

ROOT = Path(__file__).resolve().parent.parent
IDLE = "import time\ntime.sleep(60)"
SPIN = "import time\nend = time.time() + 60\nwhile time.time() < end: pass"


def pkb_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pkb_env.cli", "bench", *arguments],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def reading(
    speedup: float | None, *, load: float = 0.0, faster: bool = False, problem: str = "allreduce", waited: float = 0.0
) -> null.Reading:
    status = "CORRECT" if speedup else "INFRA"
    edge = speedup and speedup - 0.1
    return null.Reading(
        problem, status, speedup, edge, speedup, faster, 1.0, 1.0, 2.0, load, "digest", "now", stage_s={"queue": waited}
    )


def test_a_null_summary_by_hand() -> None:
    speedups = [1.0 + (i - 50) / 1000 for i in range(101)]
    (every, quiet, *_) = null.summarise([reading(s, waited=0.5) for s in speedups])
    assert (every.problem, every.load, every.readings, every.failed) == ("allreduce", null.EVERY, 101, 0)
    assert (every.band_low, every.median, every.band_high) == pytest.approx((0.9525, 1.0, 1.0475))
    assert (every.least, every.most, every.low_median) == pytest.approx((0.95, 1.05, 0.9))
    assert (every.false_faster, every.false_beyond, every.beyond) == (0.0, 0.0, 0.0)
    assert (every.seconds, every.waited_s) == (2.0, 0.5)
    assert (quiet.load, quiet.readings) == ("< 0.1", 101)


def test_readings_are_grouped_by_load_and_problem() -> None:
    found = null.summarise([
        reading(1.0), reading(1.2, load=0.3, faster=True), reading(0.9, load=2.0, problem="allgather"), reading(None, load=2.0)
    ])  # fmt: skip
    counted = {(s.problem, s.load): (s.readings, s.failed) for s in found}
    assert counted == {
        ("all", "any"): (3, 1), ("all", "< 0.1"): (1, 0), ("all", "0.1 - 0.5"): (1, 0), ("all", ">= 0.5"): (1, 1),
        ("allreduce", "any"): (2, 1), ("allreduce", "< 0.1"): (1, 0), ("allreduce", "0.1 - 0.5"): (1, 0),
        ("allreduce", ">= 0.5"): (0, 1), ("allgather", "any"): (1, 0), ("allgather", ">= 0.5"): (1, 0),
    }  # fmt: skip
    shares = {(s.problem, s.load): (s.false_faster, s.false_beyond, s.beyond) for s in found}
    assert shares["all", "any"] == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert all(math.isnan(share) for share in shares["allreduce", ">= 0.5"])


def test_a_claim_below_the_threshold_is_no_claim_beyond_it() -> None:
    (every, *_) = null.summarise([reading(1.04, faster=True), reading(1.2)])
    assert (every.false_faster, every.false_beyond, every.beyond) == (0.5, 0.0, 0.5)


@pytest.mark.parametrize(
    ("part", "count", "bound"), [(0, 60, 0.0487), (0, 360, 0.00829), (2, 360, 0.01739), (0, 0, 1.0), (5, 5, 1.0)]
)
def test_the_bound_of_a_share(part: int, count: int, bound: float) -> None:
    """Against tables: no event in n leaves 1 - 0.05^(1/n)."""
    assert null.at_most(part, count) == pytest.approx(bound, rel=1e-2)


@given(st.floats(0, 64))
def test_every_load_has_its_group(load: float) -> None:
    assert null.group(load) in {name for name, _ in null.GROUPS}


def test_a_notebook_goes_on_after_a_cut_and_refuses_other_settings(tmp_path: Path) -> None:
    Notebook(tmp_path, {"size": "tiny"}).add(reading(1.0))
    with (tmp_path / "readings.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"problem": "allre')
    again = Notebook(tmp_path, {"size": "tiny"})
    again.add(reading(1.1))
    assert Notebook(tmp_path, {"size": "tiny"}).readings == [reading(1.0), reading(1.1)]
    with pytest.raises(UsageError, match=r"size was 'tiny', is 'large'.*name another folder"):
        Notebook(tmp_path, {"size": "large"})


def test_nothing_is_measured_when_every_reading_is_there() -> None:
    notebook = Notebook(None, {})
    notebook.add(reading(1.0))
    take(Plan(("allreduce",), 1), notebook)
    assert notebook.readings == [reading(1.0)]


def test_the_meter_tells_our_load_from_that_of_others() -> None:
    with subprocess.Popen([sys.executable, "-c", SPIN]) as ours, Meter() as meter:
        time.sleep(0.4)
        ours.kill()  # what it used until its last sample is still ours
        ours.wait()
        time.sleep(0.4)
    assert 0.05 < meter.load.own < 0.7
    assert meter.load.busy >= meter.load.own - 0.1
    assert meter.load.other == max(0.0, meter.load.busy - meter.load.own)


def test_the_meter_sees_what_others_do() -> None:
    start = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SPIN!r}], stdout=subprocess.DEVNULL).pid)"
    orphan = int(subprocess.run([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True, check=True).stdout)
    try:
        with Meter() as meter:
            time.sleep(0.6)
    finally:
        os.kill(orphan, 9)
    assert meter.load.other > 0.2
    assert meter.load.own < 0.3


def test_others_are_whoever_is_not_below_the_root() -> None:
    """The busy process counts when the root is another one, and not when it is the root."""
    with subprocess.Popen([sys.executable, "-c", SPIN]) as busy, subprocess.Popen([sys.executable, "-c", IDLE]) as idle:
        time.sleep(0.2)
        with Others([idle.pid]) as others:
            time.sleep(0.6)
        with Others([busy.pid]) as ours:
            time.sleep(0.6)
        busy.kill()
        idle.kill()
    assert others.cores > 0.3
    assert others.cores > ours.cores


def launch(kind: str, seconds: float) -> latency.Launch:
    return latency.Launch(kind, "reference", seconds, {"launcher": 1.0, "run": seconds - 1.0}, other_load=0.2)


def test_latency_by_hand() -> None:
    launches = [launch("trial", 5.0), launch("trial", 7.0), latency.Launch("compare", "", 1.0), launch("timed", 7.0)]
    public = latency.baseline(launches, load_inline_s=40.0)
    assert (public.launches, public.launches_s, public.timed_s, public.other_load) == (2, 13.0, 7.0, 0.2)
    assert public.split_s == {"launcher": 1.0, "run": 5.0}
    found = [
        latency.Evaluation("cpp", "warm", s, {"load": s / 2}, 0.1) for s in (0.4, 0.5, 0.9)
    ] + [latency.Evaluation("cpp", "cached", 0.25, {"load": 0.1}, 0.0)]  # fmt: skip
    warm, cached = latency.summarise(found, public)
    assert (warm.seconds, warm.least, warm.most, warm.stage_s) == (0.5, 0.4, 0.9, {"load": 0.25})
    assert (warm.ratio, warm.ratio_timed, warm.ratio_compiled) == (26.0, 40.0, 120.0)
    assert (cached.ratio, cached.ratio_compiled) == (52.0, None)


def test_throughput_by_hand() -> None:
    stages = {"slot": 1.0, "oracle": 0.2, "load": 0.2, "run": 0.6, "queue": 1.0, "time": 1.9, "end": 0.1, "total": 6.0}
    found = [example(stage_s=stages), example(Status.WRONG_RESULT, stage_s={"run": 0.5, "total": 0.5})]
    run = throughput.summarise(2, found, 4.0, cpu=0.5, own_cpu=0.4)
    assert (run.per_hour, run.statuses) == (1800.0, {"CORRECT": 1, "WRONG_RESULT": 1})
    assert run.occupied["run"] == pytest.approx(1.1 / 4)
    assert run.occupied["share"] == pytest.approx(1.0 / 4)
    assert run.slots_used == pytest.approx(5.5 / 4 / 2)


@pytest.mark.parametrize(
    ("stages", "used", "cpu", "named"),
    [
        ({"time": 0.9}, 1.0, 0.9, "timed stage"),
        ({"time": 0.3, "run": 1.0}, 1.0, 0.9, "cores"),
        ({"time": 0.2, "run": 0.4, "queue": 1.0}, 1.0, 0.5, "machine lock"),
        ({"time": 0.2, "run": 1.6}, 0.9, 0.3, "slots"),
        ({"time": 0.1, "run": 0.2}, 0.2, 0.3, "candidates"),
    ],
)
def test_what_limits_throughput(stages: dict[str, float], used: float, cpu: float, named: str) -> None:
    occupied = dict.fromkeys(("slot", "oracle", "load", "run", "queue", "time", "end", "share"), 0.0) | stages
    assert throughput.limit(occupied, used, cpu, cpu).startswith(named)


@given(st.dictionaries(st.sampled_from(texts.KINDS), st.floats(0.01, 10), min_size=1), st.integers(1, 500))
def test_counts_add_up_and_are_fair(shares: dict[str, float], total: int) -> None:
    found = texts.counts(shares, total)
    assert sum(found.values()) == total
    assert all(abs(found[kind] - total * share / sum(shares.values())) < 1 for kind, share in shares.items())


def test_shares_must_be_shares() -> None:
    with pytest.raises(UsageError, match="not all 0"):
        texts.counts({"correct": 0.0}, 4)


def test_a_copy_is_another_candidate_with_other_cpp() -> None:
    source = texts.example("allreduce", "cpp")
    copies = [texts.unique(source, mark) for mark in ("one", "two")]
    assert len({Candidate(read(text).source).digest for text in (*copies, source)}) == 3
    assert "/* one */ extern" in copies[0]
    with pytest.raises(UsageError, match=r"no example .*torch_nothing.py; there are cpp_allgather"):
        texts.example("nothing", "torch")


@pytest.mark.parametrize("problem", ["allreduce", "vocab_parallel_cross_entropy_loss"])
def test_kinds_of_candidates_are_what_they_are_called(evaluator: Evaluator, problem: str) -> None:
    wanted = {"correct": Status.CORRECT, "wrong": Status.WRONG_RESULT, "failing": Status.RUNTIME_ERROR}
    right = texts.reference(problem)
    found = evaluator.evaluate_many([Submission(texts.of_kind(k, problem, right), problem, size="tiny") for k in wanted])
    assert [v.status for v in found] == list(wanted.values())


def test_a_null_test_is_kept_resumed_and_never_remembered(tmp_path: Path) -> None:
    asked = ("null", "-p", "allreduce", "-s", "tiny", "--pairs", "6", "--out", str(tmp_path))
    first = pkb_bench(*asked, "-n", "1", "--json")
    assert (first.returncode, first.stderr) == (0, "")
    second = pkb_bench(*asked, "-n", "2")
    assert second.returncode == 0, second.stderr
    assert second.stderr.startswith("null test 1/1: allreduce ")
    told = json.loads((tmp_path / "null.json").read_text(encoding="utf-8"))
    kept = [json.loads(line) for line in (tmp_path / "readings.jsonl").read_text(encoding="utf-8").splitlines()]
    assert told["readings"] == kept
    assert kept[0] == json.loads(first.stdout)["readings"][0]
    assert len({r["digest"] for r in kept}) == len(kept) == 2
    assert all(r["status"] == "CORRECT" and r["stage_s"]["time"] > 0 and r["other_load"] >= 0 for r in kept)
    summaries = null.summarise([null.Reading(**r) for r in kept])
    assert [asdict(s) for s in summaries] == told["summaries"]
    assert re.search(r"(?m)^allreduce +any +2 ", second.stdout)


@pytest.mark.slow
def test_latency_stands_beside_fresh_launches(tmp_path: Path) -> None:
    small = ("--trials", "1", "--repeats", "1", "--pairs", "5", "--calls", "0", "--out", str(tmp_path))
    done = pkb_bench("latency", "-b", "torch", "-s", "tiny", *small)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "latency.json").read_text(encoding="utf-8"))
    rows = {row["kind"]: row for row in told["rows"]}
    assert list(rows) == list(latency.KINDS)
    assert [(x["kind"], x["side"]) for x in told["launches"]] == [("trial", "reference"), ("trial", "candidate"), ("compare", "")]
    assert all(s >= 0 for x in told["launches"] for s in x["split_s"].values())
    assert told["launches"][0]["seconds"] == pytest.approx(sum(told["launches"][0]["split_s"].values()), abs=0.2)
    assert rows["cached"]["ratio"] > 1
    assert "torch cached" in done.stdout
    assert "2 fresh launches of torch.distributed.run" in done.stdout


def test_throughput_of_a_mix() -> None:
    mix = ("-n", "4", "--correct", "1", "--wrong", "1", "--failing", "1", "--hanging", "1", "--call-deadline", "1")
    done = pkb_bench("throughput", "-s", "tiny", "--slots", "2", "--pairs", "5", *mix, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    (run,) = told["runs"]
    assert run["statuses"] == {"CORRECT": 1, "DEADLOCK": 1, "RUNTIME_ERROR": 1, "WRONG_RESULT": 1}
    assert run["per_hour"] == pytest.approx(4 * 3600 / run["seconds"])
    assert told["config"] == EvalConfig(pairs=5, call_deadline_s=1).model_dump(mode="json")


TOLD = {
    "command": "pkb bench examples", "hardware": "a machine", "torch": "2", "date": "2020-01-02", "world_size": 2, "size": "tiny",
}  # fmt: skip


def test_a_row_by_hand() -> None:
    row = examples.row(timed(2.0, reference_ms=20.0, bound_ms=2.5, notes=("cache-hot",)), 0.12345)
    assert (row.problem, row.backend, row.status, row.faster) == ("allreduce", "torch", "CORRECT", True)
    assert (row.time_ms, row.reference_ms, row.share, row.notes, row.other_load) == (10.0, 20.0, 0.25, ("cache-hot",), 0.123)
    failed = examples.row(example(Status.WRONG_RESULT, message="rank 1 is off"), 0.0)
    assert (failed.speedup, failed.time_ms, failed.share, failed.notes) == (None, None, None, ("WRONG_RESULT: rank 1 is off",))


def test_the_page_of_the_examples() -> None:
    rows = [
        examples.row(timed(2.0, reference_ms=20.0, bound_ms=2.5, notes=("one", "two")), 0.25),
        examples.row(example(Status.RUNTIME_ERROR, message="a | b\nc"), 0.0),
    ]
    lines = examples.markdown(rows, TOLD).splitlines()
    assert lines[0] == "# The examples on a machine"
    assert "`pkb bench examples`" in lines[2]
    assert lines[4] == "torch 2, 2020-01-02, 2 ranks, size tiny; cores busy with what others did: 0.00 to 0.25."
    table = [line for line in lines if line.startswith("|")]
    assert table[0] == f"| {' | '.join(examples.COLUMNS)} |"
    assert table[2] == "| allreduce | torch | 2.00x | 2.00 - 2.00 | yes | 10 | 20 | 2.5 | 25.0% | one; two |"
    assert table[3].endswith(" | no |  |  |  |  | RUNTIME_ERROR: a \\| b c |")
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {len(examples.COLUMNS) + 1}


def test_every_example_is_evaluated() -> None:
    asked = ExamplesPlan().submissions()
    files = [f"{s.backend}_{s.problem}" for s in asked]
    there = [p.stem for p in texts.EXAMPLES.glob("*_*.py")]
    assert sorted(files) == sorted(name for name in there if name.split("_")[0] in backends.names())
    assert files[:2] == ["torch_allreduce", "cpp_allreduce"]
    with pytest.raises(UsageError, match="world size 0 fits none"):
        ExamplesPlan(world_size=0).submissions()


def test_a_table_of_the_examples(tmp_path: Path) -> None:
    done = pkb_bench("examples", "-s", "tiny", "--pairs", "8", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cpu.md").read_text(encoding="utf-8") == done.stdout
    told = json.loads((tmp_path / "examples.json").read_text(encoding="utf-8"))
    assert told["command"] == f"pkb bench examples --size tiny --pairs 8 --out {tmp_path}"
    count = len(ExamplesPlan().submissions())
    assert [row["status"] for row in told["rows"]] == ["CORRECT"] * count
    assert all(row["bound_ms"] < row["time_ms"] and row["share"] == row["bound_ms"] / row["time_ms"] for row in told["rows"])
    assert re.search(rf"(?m)^examples {count}/{count}: cpp_vocab_parallel_cross_entropy_loss \d", done.stderr)


BOTH = (lazy.RIGHT, lazy.REFERENCE)
LAZY = (
    lazy.Row("allreduce", "upstream", "upstream", 5, BOTH, ("zeros", lazy.TRUE, *BOTH)),
    lazy.Row("allgather", "upstream", "tiny", 5, ("zeros", *BOTH), ("zeros", "ones", lazy.REFERENCE)),
    lazy.Row("allreduce", "hardened", "default", 1, BOTH, BOTH, {"ones": "ValueError: a | b"}),
    lazy.Row("allgather", "hardened", "default", 0, failed="RankFailed: late"),
)
LAZY_TOLD = {**TOLD, "command": "pkb bench lazy", "trials": 5, "seconds": 1.6, "peak_bytes": 3 << 20, "dtype": "float32"}


def test_lazy_answers_are_counted_by_hand() -> None:
    columns = [(profile, check) for profile in ("upstream", "hardened") for check in ("public check", "judge")]
    found = lazy.counts(LAZY, ("zeros", "ones", lazy.TRUE, lazy.RIGHT))
    assert {kind: [count[column] for column in columns] for kind, count in found.items()} == {
        "zeros": [2, 1, 0, 0], "ones": [1, 0, 0, 0], lazy.TRUE: [1, 0, 0, 0], lazy.RIGHT: [1, 2, 1, 1], lazy.ANY: [2, 1, 0, 0],
    }  # fmt: skip


def test_the_page_of_lazy_answers() -> None:
    text = lazy.markdown(LAZY, ("zeros", lazy.TRUE), LAZY_TOLD)
    lines = text.splitlines()
    assert lines[0] == "# Lazy answers on a machine"
    assert lines[4].endswith("2 ranks, 5 trials; took 2 s and at most 3 MiB in one process.")
    assert "| answer | upstream, public check, of 2 | upstream, judge, of 2 | hardened, public check, of 1 |" in lines[6]
    assert "| zeros | 2 | 1 | 0 | 0 |" in lines
    assert "| allgather | upstream | zeros, ones | zeros |" in lines
    assert f"| allgather | upstream | {lazy.RIGHT} |  |" in lines
    assert "| allreduce | hardened | ones | ValueError: a \\| b |" in lines
    assert "| allgather | hardened | all | RankFailed: late |" in lines
    assert "`upstream` has upstream, but where that is too heavy for a CPU: allgather have tiny.  `hardened` has default" in text


def test_a_shape_that_is_too_heavy_gives_way() -> None:
    plan = LazyPlan(problem_set("all"))
    light, heavy = problem_set("allreduce")[0], problem_set("opensora_conv3d_allreduce")[0]
    assert [plan.size_of(light, profile) for profile in ("upstream", "hardened")] == ["upstream", "default"]
    assert plan.size_of(heavy, "upstream") in ("default", "tiny")


def test_lazy_answers_pass_upstream_and_are_refused_here(tmp_path: Path) -> None:
    both = ("--problems", "allreduce", "--problem", "allgather")
    done = pkb_bench("lazy", *both, "--trials", "2", "-s", "tiny", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "lazy.md").read_text(encoding="utf-8") == done.stdout
    told = json.loads((tmp_path / "lazy.json").read_text(encoding="utf-8"))
    assert told["command"] == f"pkb bench lazy --problem allreduce --problem allgather --trials 2 --size tiny --out {tmp_path}"
    assert set(told["counts"]) == {*ANSWERS, lazy.ANY}
    assert told["counts"]["rank only"] == {
        "upstream, public check": 2, "upstream, judge": 2, "hardened, public check": 0, "hardened, judge": 0,
    }  # fmt: skip
    assert all(set(told["counts"][answer].values()) == {2} for answer in BOTH)
    assert all(row["judge"] == [*BOTH] and row["trials"] == 1 for row in told["rows"] if row["profile"] == "hardened")
    assert told["peak_bytes"] >= max(row["rank_bytes"] for row in told["rows"]) > 1 << 20
    assert re.search(r"(?m)^lazy 4/4: hardened allgather \(tiny\), \d", done.stderr)


def test_a_strange_number_of_slots_is_one_line() -> None:
    done = pkb_bench("throughput", "--slots", "1,none")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--slots takes numbers >= 1 separated by commas" in done.stderr
