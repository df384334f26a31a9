"""Stored rollouts under other rewards: hand-made episodes, and the commands on a store.

Not here: what a reward is (`test_rewards`), advantages (`test_advantages`).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from verdicts import example, timed

import rewards
from pkb_env.errors import UsageError
from pkb_env.rows import Key, Rollout
from pkb_env.scoring import export
from pkb_env.scoring.episodes import Episode, episodes
from pkb_env.scoring.rescore import difference, places, rescore
from pkb_env.store import Store
from rewards import Status, Verdict

ROOT = Path(__file__).resolve().parent.parent
FAST, SLOW, WRONG, STUCK = timed(4.0), timed(0.5), example(Status.WRONG_RESULT, passed=0.5), example(Status.DEADLOCK)
KEVIN, SPARSE = rewards.get("kevin"), rewards.get("sparse")


def turn(number: int = 0, *, group: int = 0, sample: int = 0, run: str = "run", verdict: int | None = None) -> Rollout:
    return Rollout(run, 1, group, number, "Write", f"text {group} {sample} {number}", verdict, sample)


def episode(*verdicts: Verdict | None, group: int = 0, sample: int = 0) -> Episode:
    turns = tuple(turn(number, group=group, sample=sample) for number in range(len(verdicts)))
    return Episode(("run", 1, group), turns, verdicts)


def put(store: Store, verdict: Verdict, text: str) -> int:
    told = verdict.but(digest=text)
    return store.put(Key.of(told, "0", "{}"), told, text, b"")


def filled(path: Path, *, groups: int, samples: int) -> Store:
    """Groups whose samples are fast, slow, wrong, stuck in turn, one of them unscored."""
    store, kinds = Store(path), (FAST, SLOW, WRONG, STUCK)
    for group in range(groups):
        for sample in range(samples):
            row = None if sample == 4 else put(store, kinds[(group + sample) % 4], f"{group} {sample}")
            store.add_rollouts([turn(group=group, sample=sample, verdict=row)])
    return store


def test_single_turns_are_compared_in_their_group() -> None:
    found = [episode(FAST, sample=0), episode(WRONG, sample=1), episode(None, sample=2), episode(WRONG, group=1)]
    scored = rescore(found, KEVIN, advantage="dr_grpo")
    assert scored.values == pytest.approx((4.3, 0.0, None, 0.0))
    assert scored.advantages == pytest.approx((2.15, -2.15, 0.0, 0.0))
    assert (scored.groups, scored.flat) == (2, 1)
    assert scored.mean == pytest.approx(4.3 / 3)


def test_turns_get_returns_and_are_compared_turn_by_turn() -> None:
    found = [episode(WRONG, FAST, sample=0), episode(SLOW, None, sample=1)]
    scored = rescore(found, KEVIN, gamma=0.5, advantage="dr_grpo")
    assert scored.values == pytest.approx((2.15, 4.3, 0.8, None))
    assert scored.advantages == pytest.approx((0.675, 0.0, -0.675, 0.0))
    assert list(places(found).values()) == [[0, 2], [1, 3]]
    assert rescore(found, KEVIN, gamma=0.0).values == pytest.approx((0.0, 4.3, 0.8, None))


def test_a_reward_sees_the_earlier_turns_of_the_episode() -> None:
    seen = []

    class Watching:
        name = "watching"

        def __call__(self, verdict: Verdict, history: rewards.History = ()) -> rewards.Score:
            seen.append((verdict, history))
            return rewards.Score((rewards.Term("zero", 0.0),))

    rescore([episode(WRONG, None, FAST)], Watching())
    assert seen == [(WRONG, ()), (FAST, (WRONG,))]


def test_what_another_reward_changes() -> None:
    """Two fast ones, two slow ones, one that is nearly right: `kevin` tells all apart, `sparse` not how fast they are."""
    found = [episode(v, sample=i) for i, v in enumerate((timed(1.2), timed(3.0), SLOW, timed(0.9), WRONG))]
    kevin, sparse = (rescore(found, reward, advantage="dr_grpo") for reward in (KEVIN, SPARSE))
    assert kevin.advantages == pytest.approx((0.14 - 0.0, 1.94, -0.56, -0.16, -1.36), abs=0.011)
    assert sparse.advantages == pytest.approx((0.8, 0.8, -0.2, -0.2, -1.2))
    found_between = difference(kevin, sparse, list(places(found).values()))
    assert found_between.changed_signs == 0
    assert found_between.other_best == 0
    assert found_between.rank_correlation == pytest.approx(0.9486833)
    values, advantages = (tuple(-v for v in column if v is not None) for column in (sparse.values, sparse.advantages))
    turned = replace(sparse, values=values, advantages=advantages)
    back = difference(kevin, turned, list(places(found).values()))
    assert (back.changed_signs, back.other_best) == (5, 1)
    assert back.rank_correlation == pytest.approx(-0.9486833)


def test_no_order_gives_no_correlation() -> None:
    scored = rescore([episode(WRONG), episode(WRONG, sample=1)], KEVIN)
    assert math.isnan(difference(scored, scored, []).rank_correlation)
    assert math.isnan(rescore([episode(None)], KEVIN).mean)


def test_a_store_gives_its_episodes_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.db")
    row = put(store, FAST, "a")
    seen = partial(turn, verdict=row)
    store.add_rollouts([turn(1, sample=1), seen(0, sample=1), seen(0), seen(0, run="other")])
    fast = FAST.but(digest="a")
    assert [(e.group, e.verdicts) for e in episodes(store)] == [
        (("run", 1, 0), (fast, None)), (("run", 1, 0), (fast,)), (("other", 1, 0), (fast,)),
    ]  # fmt: skip
    assert len(episodes(store, "other")) == 1
    with pytest.raises(UsageError, match="no rollouts of run 'mine'; runs in it: run, other"):
        episodes(store, "mine")


def test_verdicts_alone_are_groups_by_problem(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.db")
    with pytest.raises(UsageError, match="neither rollouts nor verdicts"):
        episodes(store)
    for text, verdict in (("a", FAST), ("b", WRONG), ("c", SLOW.but(problem="allgather"))):
        put(store, verdict, text)
    found = episodes(store)
    assert [e.turns[0].completion for e in found] == ["a", "b", "c"]
    assert [len(members) for members in places(found).values()] == [2, 1]
    assert "# Sum a tensor over all ranks" in found[0].turns[0].prompt


def test_a_text_without_code_is_compared_with_the_others_of_its_problem(tmp_path: Path) -> None:
    """It never ran, so it has no hardware."""
    store = Store(tmp_path / "s.db")
    put(store, FAST.but(hardware="some CPU"), "a")
    store.row_of(example(Status.INVALID, digest="b"), "no code")
    scored = rescore(episodes(store), KEVIN, advantage="dr_grpo")
    assert scored.groups == 1
    assert scored.advantages == pytest.approx((2.15, -2.15))


def pkb(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pkb_env.cli", *map(str, arguments)],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_six_hundred_rollouts_are_scored_in_seconds(tmp_path: Path) -> None:
    filled(tmp_path / "s.db", groups=120, samples=5).close()
    start = time.monotonic()
    done = pkb("score", tmp_path / "s.db", "--reward", "kevin", "--versus", "default", "--versus", "sparse", "--json")
    took = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [(each["reward"], each["unscored"], each["groups"], each["flat"]) for each in told["rewards"]] == [
        ("kevin", 120, 120, 0), ("default", 120, 120, 0), ("sparse", 120, 120, 0),
    ]  # fmt: skip
    assert len(told["rewards"][0]["values"]) == 600
    assert told["differences"][0]["rank_correlation"] > 0.9
    print(f"600 rollouts under three rewards: {took:.1f} s")
    assert took < 100


def test_the_comparison_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    filled(tmp_path / "s.db", groups=3, samples=5).close()
    done = pkb("score", tmp_path / "s.db", "--versus", "sparse", "--plot", tmp_path / "p.png")
    assert done.returncode == 0, done.stderr
    assert "15 episodes, 15 turns, 3 of them unscored" in done.stdout
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--reward", "kevni"), "unknown reward 'kevni'; did you mean 'kevin'?"),
        (("--reward", "none.toml"), "there is no reward file none.toml"),
        (("--versus", "kevin", "--returns", "mean"), "--returns 'mean': wanted one of sum, max"),
        (("--advantage", "gropo"), "--advantage 'gropo': wanted one of grpo"),
        (("--plot", "p.png"), "name the second with --versus"),
        (("--versus", "kevin", "--plot", "p.xyz"), "ends in '.xyz'; wanted .png, .pdf or .svg"),
        (("--run", "mine"), "no rollouts of run 'mine'"),
    ],
)
def test_bad_requests_get_one_line(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    filled(tmp_path / "s.db", groups=1, samples=2).close()
    done = pkb("score", tmp_path / "s.db", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_rows_for_training(tmp_path: Path) -> None:
    filled(tmp_path / "s.db", groups=2, samples=5).close()
    done = pkb("export", tmp_path / "s.db", tmp_path / "rows.jsonl", "--only", "correct")
    assert (done.returncode, done.stdout) == (0, f"4 rows in {tmp_path / 'rows.jsonl'}\n"), done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(r["completion"], r["status"], r["proven_speedup"], r["value"]) for r in rows] == [
        ("text 0 0 0", "CORRECT", 4.0, 3.0), ("text 0 1 0", "CORRECT", 0.5, 0.0),
        ("text 1 0 0", "CORRECT", 0.5, 0.0), ("text 1 3 0", "CORRECT", 4.0, 3.0),
    ]  # fmt: skip
    again = pkb("export", tmp_path / "s.db", tmp_path / "rows.jsonl")
    assert (again.returncode, "is there already; name another" in again.stderr) == (2, True)


def test_unscored_rows_and_odd_texts_are_kept() -> None:
    broken = Episode(("run", 1, 0), (replace(turn(), completion="a \ud800"),), (None,))
    found = [broken, episode(FAST, sample=1)]
    rows = export.rows(found, rescore(found, KEVIN))
    assert [(row["value"], row["status"]) for row in rows] == [(None, None), (pytest.approx(4.3), "CORRECT")]
    assert [len(export.keep(rows, only)) for only in export.ONLY] == [2, 1, 1, 1]
    assert set(rows[0]) == set(rows[1])


@pytest.mark.parametrize("name", ["rows.parquet", "folder"])
def test_rows_as_parquet_and_as_a_dataset(tmp_path: Path, name: str) -> None:
    datasets = pytest.importorskip("datasets")
    broken = Episode(("run", 1, 0), (replace(turn(), completion="a \ud800"),), (None,))
    found = [broken, episode(FAST, sample=1)]
    rows = export.rows(found, rescore(found, KEVIN))
    export.write(tmp_path / name, rows)
    load = datasets.Dataset.from_parquet if name.endswith("parquet") else datasets.load_from_disk
    again = load(str(tmp_path / name)).to_list()
    assert again == [{**rows[0], "completion": "a ?"}, rows[1]]


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ends in '.csv'; wanted .jsonl, .parquet"):
        export.write(tmp_path / "a.csv", [{"a": 1}])
    with pytest.raises(UsageError, match="no row to write"):
        export.write(tmp_path / "a.jsonl", [])
    with pytest.raises(UsageError, match="'best' keeps nothing known; wanted one of all, scored, correct, faster"):
        export.keep([], "best")
