"""The Gymnasium environment over verdicts recorded in a real store."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from verdicts import example, timed

import pkb_env
import problems
from pkb_env.env import ParallelKernelEnv
from pkb_env.errors import UsageError
from pkb_env.registration import ID, register
from pkb_env.spaces import SourceText
from pkb_env.store import Key, Store
from pkb_env.submission import Candidate
from rewards.score import History, Score, Term
from rewards.verdict import RankReport, Status, Verdict

ROOT = Path(__file__).parent.parent
FAST = "def solution(tensor):\n    return tensor + 1\n"
SLOW = "def solution(tensor):\n    return tensor + 2\n"
WRONG = "def solution(tensor):\n    return tensor\n"
UNKNOWN = "def solution(tensor):\n    return 'never recorded'\n"


def record(path: Path) -> None:
    """Verdicts of the three sources on allreduce and allgather."""
    store = Store(path)
    wrong = example(
        Status.WRONG_RESULT, passed=0.5, message="rank 1 is wrong",
        ranks=(RankReport(0), RankReport(1, output=0, index=(1, 2), got="1", expected="2")),
    )  # fmt: skip
    for source, verdict in ((FAST, timed(2.0)), (SLOW, timed(0.5)), (WRONG, wrong)):
        for problem in ("allreduce", "allgather"):
            found = verdict.but(digest=Candidate(source).digest, size="default", problem=problem)
            store.put(Key.of(found, "0", "c"), found, source, b"s")
    store.close()


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    record(tmp_path / "s.db")
    return f"recorded:{tmp_path / 's.db'}"


@pytest.fixture
def env(recorded: str) -> Iterator[gymnasium.Env[Any, str]]:
    env = gymnasium.make(ID, evaluator=recorded, max_turns=3, render_mode="ansi")
    yield env
    env.close()


def test_check_env_passes(recorded: str) -> None:
    for turns in (1, 3):
        env = gymnasium.make(ID, evaluator=recorded, max_turns=turns, render_mode="ansi", problem=["allreduce", "allgather"])
        check_env(env.unwrapped)
        env.close()
        bare = ParallelKernelEnv(evaluator=recorded, max_turns=turns)
        check_env(bare, skip_render_check=True)
        bare.close()


def test_one_turn_is_one_scored_completion(recorded: str) -> None:
    env = gymnasium.make(ID, evaluator=recorded)
    observation, info = env.reset(seed=1)
    assert "Sum a tensor" in observation["prompt"]
    assert observation["feedback"] == ""
    assert info == {"problem": "allreduce"}
    observation, reward, terminated, truncated, info = env.step(f"Mine:\n```python\n{FAST}```\n")
    assert reward == pytest.approx(2.0)
    assert (terminated, truncated) == (True, False)
    assert info["unscored"] is False
    assert info["total"] == reward
    assert info["terms"]["log_speed"] == {"score": pytest.approx(1.0), "weight": 1.0}
    assert Verdict.from_json(json.dumps(info["verdict"])).speedup == 2.0
    assert "2.00x as fast" in observation["feedback"]
    json.dumps(info)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.unwrapped.step(FAST)
    env.close()


def test_more_turns_keep_the_best_so_far(env: gymnasium.Env[Any, str]) -> None:
    observation, _ = env.reset(seed=0)
    seen = []
    for action in (WRONG, FAST, SLOW):
        observation, reward, terminated, truncated, _ = env.step(action)
        seen.append((int(observation["turn"]), int(observation["turns_left"]), float(reward), terminated, truncated))
    assert [s[0] for s in seen] == [1, 2, 3]
    assert [s[1] for s in seen] == [2, 1, 0]
    assert [s[3] for s in seen] == [False, False, True]
    assert not any(s[4] for s in seen)
    assert seen[1][2] > seen[2][2] > seen[0][2]
    assert observation["best_reward"] == pytest.approx(seen[1][2])
    assert observation["best_speedup"] == 2.0
    rendered = env.render()
    assert isinstance(rendered, str)
    assert "attempt 3 of 3" in rendered


def test_a_wrong_result_is_told_with_rank_and_index(env: gymnasium.Env[Any, str]) -> None:
    env.reset(seed=0)
    observation = env.step(WRONG)[0]
    assert "rank 1, output 0, index [1, 2]: got 1, expected 2" in observation["feedback"]


@pytest.mark.parametrize("action", ["", "no code", "\ud800", "x" * 300_000, b"def solution(x): ...", None, 3, np.zeros(3)])
def test_a_step_never_raises_for_what_a_policy_sends(env: gymnasium.Env[Any, str], action: Any) -> None:
    env.reset(seed=0)
    observation, reward, _, truncated, info = env.unwrapped.step(action)
    assert info["verdict"]["status"] == "INVALID"
    assert (reward, truncated) == (info["total"], False)
    assert float(reward) < 0
    assert observation in env.observation_space
    assert "Not accepted" in observation["feedback"]


def test_what_was_not_scored_is_no_zero(env: gymnasium.Env[Any, str]) -> None:
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step(UNKNOWN)
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert (info["unscored"], info["total"]) == (True, None)
    assert info["verdict"]["status"] == "INFRA"


def test_the_seed_draws_the_problem(recorded: str) -> None:
    env = gymnasium.make(ID, evaluator=recorded, problem="train")
    drawn = [env.reset(seed=seed)[1]["problem"] for seed in range(20)]
    assert drawn == [env.reset(seed=seed)[1]["problem"] for seed in range(20)]
    assert len(set(drawn)) > 1
    assert {problems.load(name).split for name in drawn} == {"train"}
    env.reset(seed=7)
    following = [env.reset()[1]["problem"] for _ in range(5)]
    env.reset(seed=7)
    assert following == [env.reset()[1]["problem"] for _ in range(5)]
    assert env.reset(options={"problem": "allgather"})[1]["problem"] == "allgather"
    with pytest.raises(UsageError, match="did you mean"):
        env.reset(options={"problem": "algather"})


def test_the_spec_is_plain_data(recorded: str) -> None:
    env = gymnasium.make(ID, evaluator=recorded, problem=["allreduce"], config={"pairs": 0}, max_turns=2)
    assert env.spec is not None
    again = gymnasium.make(gymnasium.envs.registration.EnvSpec.from_json(env.spec.to_json()))
    assert again.reset(seed=0)[0]["turns_left"] == 2
    assert env.spec.nondeterministic


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"problem": "alreduce"}, "did you mean 'allreduce'"),
        ({"problem": []}, "names no problem"),
        ({"backend": "parallelkittens"}, "planned"),
        ({"backend": "cpp", "topology": "node"}, "does not run on topology"),
        ({"topology": "moon"}, "does not run on topology"),
        ({"profile": "soft"}, "unknown profile"),
        ({"size": "huge"}, "no size 'huge'"),
        ({"world_size": 0}, "fits none"),
        ({"max_turns": 0}, "max_turns=0"),
        ({"reward": "kevn"}, "did you mean 'kevin'"),
        ({"reward": "missing.toml"}, "missing.toml"),
        ({"config": {"pears": 3}}, "pears"),
    ],
)
def test_what_does_not_exist_is_refused_when_it_is_made(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gymnasium.make(ID, **settings)


def test_an_unknown_evaluator_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="recorded:PATH"):
        gymnasium.make(ID, evaluator="elsewhere")
    with pytest.raises(UsageError, match="no store at"):
        gymnasium.make(ID, evaluator=f"recorded:{tmp_path}/missing.db")


def count_turns(verdict: Verdict, history: History = ()) -> Score:
    return Score((Term(verdict.status.lower(), float(len(history))),))


def test_a_reward_is_a_preset_a_file_or_a_callable(recorded: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('name = "mine"\n[[terms]]\nkind = "status_floor"\nweight = 10.0\n')
    for reward, wanted in (("kevin", 2.3), (tmp_path / "mine.toml", 10.0), (count_turns, 0.0)):
        env = gymnasium.make(ID, evaluator=recorded, reward=reward)
        env.reset(seed=0)
        assert env.step(FAST)[1] == pytest.approx(wanted)
        env.close()
    env = gymnasium.make(ID, evaluator=recorded, reward=count_turns, max_turns=3)
    env.reset(seed=0)
    assert [env.step(FAST)[1] for _ in range(3)] == [0.0, 1.0, 2.0]
    env.close()


def test_an_evaluator_that_was_handed_in_stays_open(tmp_path: Path) -> None:
    record(tmp_path / "s.db")
    store = Store(tmp_path / "s.db")

    class Counting(pkb_env.RecordedEvaluator):
        closed = 0

        def close(self) -> None:
            type(self).closed += 1

    env = gymnasium.make(ID, evaluator=Counting(store))
    assert env.spec is not None
    env.reset(seed=0)
    assert env.step(FAST)[2]
    env.close()
    assert Counting.closed == 0
    store.close()


def test_the_space_takes_any_text_and_samples_little() -> None:
    space = SourceText(10, seed=3)
    assert "π\0\ud800" in space
    assert "x" * 11 not in space
    assert 3 not in space
    assert all(space.sample() in space for _ in range(50))
    assert space == SourceText(10) != SourceText(11)
    assert pickle.loads(pickle.dumps(space)) == space  # noqa: S301
    assert SourceText(10, seed=5).sample() == SourceText(10, seed=5).sample()
    with pytest.raises(ValueError, match="leaves no room"):
        SourceText(0)


def test_the_id_is_registered_once() -> None:
    before = gymnasium.spec(ID)
    register()
    assert gymnasium.spec(ID) is before


def run(code: str, **environment: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    settings = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_both_ways_of_making_it_work() -> None:
    made = "print(env.unwrapped.spec.id)"
    assert run(f"import gymnasium\nenv = gymnasium.make('pkb_env:{ID}')\n{made}") == f"{ID}\n"
    assert run(f"import pkb_env\nimport gymnasium\nenv = gymnasium.make('{ID}')\n{made}") == f"{ID}\n"


def test_importing_is_cheap() -> None:
    code = "import sys, pkb_env\nprint('torch' in sys.modules, 'gymnasium' in sys.modules, 'jinja2' in sys.modules)"
    assert run(code) == "False True False\n"
    assert run(code, PKB_NO_GYM="1") == "False False False\n"


def test_public_names_are_those_of_their_modules() -> None:
    assert pkb_env.Store is Store
    assert set(pkb_env.__all__) <= set(dir(pkb_env))
    with pytest.raises(AttributeError, match="no attribute 'Stor'"):
        _ = pkb_env.Stor
