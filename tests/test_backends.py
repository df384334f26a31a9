"""Every backend's worked example runs on real ranks and computes what it says."""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from pkb_env import backends
from pkb_env.backends import names
from pkb_env.config import EvalConfig
from pkb_env.evaluator import Evaluator
from pkb_env.registration import ID
from pkb_env.submission import Submission

CHECKED = """

def solution(tensor):
    for values in (tensor, tensor + 1):
        first = values.clone()
        dist.broadcast(first, src=0)
        assert torch.equal(toy(values), torch.add(values, first, alpha=2.0))
    out = tensor.clone()
    dist.all_reduce(out)
    return out
"""

RIGHT = """\
import torch.distributed as dist


def solution(tensor):
    out = tensor.clone()
    dist.all_reduce(out)
    return out
"""


@pytest.fixture(scope="module")
def evaluator() -> Iterator[Evaluator]:
    with Evaluator(EvalConfig(trials=2, pairs=0)) as evaluator:
        yield evaluator


def checked(backend: str) -> str:
    """The worked example, then an all-reduce that first holds it against torch."""
    return backends.load(backend).example.replace("def solution(", "def toy(") + CHECKED


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("backend", names())
def test_the_worked_example_computes_its_toy_operation(evaluator: Evaluator, backend: str, world_size: int) -> None:
    verdict = evaluator.evaluate(Submission(checked(backend), "allreduce", backend, world_size, size="tiny"))
    assert verdict.correct, verdict.message


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("backend", names("shared"))
def test_the_worked_example_computes_its_toy_operation_on_a_gpu(evaluator: Evaluator, backend: str, world_size: int) -> None:
    verdict = evaluator.evaluate(Submission(checked(backend), "allreduce", backend, world_size, topology="shared", size="tiny"))
    assert verdict.correct, verdict.message


def test_check_env_passes_with_the_default_evaluator() -> None:
    env = gymnasium.make(ID, size="tiny", config={"trials": 1, "pairs": 10}, render_mode="ansi")
    check_env(env.unwrapped)
    env.reset(seed=0)
    observation, reward, terminated, _, info = env.step(RIGHT)
    assert (info["verdict"]["status"], terminated) == ("CORRECT", True)
    assert float(reward) >= 0  # a correct candidate's floor: at this size the interval's lower end may be far below parity
    assert "`solution` takes" in observation["feedback"]
    env.close()


def test_a_batch_of_real_evaluations_keeps_its_order(evaluator: Evaluator) -> None:
    wrong = "def solution(tensor):\n    return tensor.clone()\n"
    env = gymnasium.make_vec(ID, 4, evaluator=evaluator, size="tiny")
    env.reset(seed=0)
    observation, rewards, terminated, _, info = env.step([RIGHT, wrong, "no", RIGHT])
    assert [verdict["status"] for verdict in info["verdict"]] == ["CORRECT", "WRONG_RESULT", "INVALID", "CORRECT"]
    assert rewards[0] == rewards[3] == 1.0
    assert terminated.all()
    assert "Correct on all 2 ranks" in observation["feedback"][3]
    env.close()
