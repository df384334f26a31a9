"""Batches of episodes: one evaluator, one call for the batch, resets by mask."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from test_env import FAST, SLOW, UNKNOWN, WRONG, record

from pkb_env.errors import UsageError
from pkb_env.recorded import RecordedEvaluator
from pkb_env.registration import ID
from pkb_env.submission import Submission
from rewards.verdict import Verdict


class Counted(RecordedEvaluator):
    """Notes how many submissions came together."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, missing="unscored")
        self.batches: list[int] = []

    def __reduce__(self) -> tuple[object, ...]:
        return Counted, (self._store.path,)

    def evaluate_many(self, submissions: Iterable[Submission], deadline_s: float | None = None) -> list[Verdict]:
        submissions = list(submissions)
        self.batches.append(len(submissions))
        return super().evaluate_many(submissions, deadline_s)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    record(tmp_path / "s.db")
    return tmp_path / "s.db"


def make(path: Path, count: int = 3, **settings: Any) -> Any:
    return gymnasium.make_vec(ID, count, evaluator=f"recorded:{path}", **settings)


def test_make_vec_gives_the_batched_environment(path: Path) -> None:
    env = make(path, problem=["allreduce", "allgather"])
    assert env.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    observation, info = env.reset(seed=0)
    assert observation in env.observation_space
    assert env.reset(seed=0)[1]["problem"].tolist() == info["problem"].tolist()
    assert env.spec is not None
    observation, rewards, terminated, truncated, info = env.step([FAST, WRONG, UNKNOWN])
    assert observation in env.observation_space
    assert (rewards.dtype, terminated.dtype) == (np.float64, np.bool_)
    assert rewards[0] > 1
    assert rewards[1] < 0
    assert rewards[2] == 0
    assert terminated.tolist() == [True, True, False]
    assert truncated.tolist() == [False, False, True]
    assert info["unscored"].tolist() == [False, False, True]
    assert [verdict["status"] for verdict in info["verdict"]] == ["CORRECT", "WRONG_RESULT", "INFRA"]
    env.close()


def test_a_batch_is_one_call_of_the_evaluator(path: Path) -> None:
    evaluator = Counted(path)
    env = gymnasium.make_vec(ID, 4, evaluator=evaluator, max_turns=3)
    env.reset(seed=0)
    env.step([FAST, SLOW, WRONG, None])
    env.step([b"x", 1, [], {}])
    assert evaluator.batches == [3]
    env.close()
    evaluator.close()


def test_only_the_masked_episodes_begin_anew(path: Path) -> None:
    env = make(path, max_turns=2)
    env.reset(seed=0)
    env.step([FAST, UNKNOWN, SLOW])
    with pytest.raises(gymnasium.error.ResetNeeded, match="episodes 1 are over"):
        env.step([FAST, FAST, FAST])
    observation, info = env.reset(options={"reset_mask": np.array([False, True, False]), "problem": "allgather"})
    assert observation["turn"].tolist() == [1, 0, 1]
    assert info["problem"].tolist() == [None, "allgather", None]
    assert info["_problem"].tolist() == [False, True, False]
    observation, _, terminated, _, _ = env.step([FAST, FAST, FAST])
    assert terminated.tolist() == [True, False, True]
    assert "allgather" not in observation["prompt"][0]
    env.close()


def test_each_episode_can_have_its_problem(path: Path) -> None:
    env = make(path, 2)
    assert env.reset(options={"problem": ["allgather", "allreduce"]})[1]["problem"].tolist() == ["allgather", "allreduce"]
    env.close()


def test_the_batch_equals_single_environments(path: Path) -> None:
    env = make(path, problem="train", max_turns=2)
    observation, info = env.reset(seed=5)
    for i in range(3):
        single = gymnasium.make(ID, evaluator=f"recorded:{path}", problem="train", max_turns=2)
        alone, alone_info = single.reset(seed=5 + i)
        assert alone["prompt"] == observation["prompt"][i]
        assert alone_info["problem"] == info["problem"][i]
        single.close()
    env.close()


def test_what_does_not_fit_the_batch_is_refused(path: Path) -> None:
    env = make(path)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step([FAST] * 3)
    with pytest.raises(UsageError, match="never begun"):
        env.reset(options={"reset_mask": np.array([True, False, False])})
    env.reset(seed=[1, 2, 3])
    for actions in (FAST, [FAST]):
        with pytest.raises(UsageError, match="sequence of 3 texts"):
            env.step(actions)
    for mask in ([True], [0, 1, 0], [False] * 3):
        with pytest.raises(UsageError, match="reset_mask"):
            env.reset(options={"reset_mask": np.array(mask)})
    with pytest.raises(UsageError, match="seed has 2 entries"):
        env.reset(seed=[1, 2])
    env.close()
    with pytest.raises(UsageError, match="num_envs=0"):
        make(path, 0)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_gymnasiums_own_vector_forms_work_too(path: Path, mode: str) -> None:
    settings = {"autoreset_mode": AutoresetMode.DISABLED} | ({"shared_memory": False} if mode == "async" else {})
    env = make(path, 2, vectorization_mode=mode, vector_kwargs=settings, max_turns=2)
    observation, _ = env.reset(seed=0)
    assert "Sum a tensor" in observation["prompt"][1]
    observation, rewards, *_ = env.step((FAST, WRONG))
    assert rewards[0] > rewards[1]
    assert "Wrong result" in observation["feedback"][1]
    env.close()
