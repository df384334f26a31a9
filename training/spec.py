"""Kernels as an environment for TRL's trainers, for models that call tools: several attempts in one conversation.

    spec = KernelSpec(KernelArguments(problems=["train"], backend="cpp"), max_turns=4)
    GRPOTrainer(model, train_dataset=spec.train_dataset, environment_factory=spec.environment_factory,
                reward_funcs=spec.reward_funcs, args=config)

The tool `submit` evaluates a candidate and answers with feedback.  An episode is worth its best attempt; one without any is
worth what a text without code is.  The trainer calls tools one after the other: where models write code blocks rather than
tool calls, `grpo` evaluates a whole step at once.

Not here: batches of single attempts (`rewarding`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from datasets import Dataset

from pkb_env.config import EvalConfig
from pkb_env.env import ParallelKernelEnv
from pkb_env.evaluator import Evaluator
from pkb_env.store import Store
from training.settings import KernelArguments

_OVER = "The episode is over; answer without calling tools."


@cache
def shared_evaluator(config: str, store: str) -> Evaluator:
    """The one evaluator of this process with these settings; it ends with the process."""
    return Evaluator(EvalConfig.model_validate_json(config), Store(store) if store else None)


@dataclass
class Episode:
    """What came of the attempts so far."""

    scores: list[float | None] = field(default_factory=list)
    """None: unscored."""
    statuses: list[str] = field(default_factory=list)
    over: bool = False


class KernelEnvironment:
    """One conversation at a time.  Public methods are what TRL expects: `reset`, and a tool."""

    def __init__(self, kernels: KernelArguments, max_turns: int) -> None:
        settings, evaluator = kernels.settings, shared_evaluator(kernels.placed().model_dump_json(), kernels.store)
        self._env = ParallelKernelEnv(
            kernels.problems, backend=settings.backend, world_size=settings.world_size, topology=settings.topology,
            profile=settings.profile, size=settings.size, max_turns=max_turns, reward=kernels.reward,
            evaluator=evaluator, config=kernels.config,
        )  # fmt: skip
        self.episode = Episode(over=True)

    def reset(self, problem: str = "", **_: object) -> str:
        """Begin an episode with the problem of a row; the text is appended to the prompt."""
        observation, _info = self._env.reset(options={"problem": problem} if problem else None)
        self.episode = Episode()
        return str(observation["prompt"])

    def submit(self, code: str) -> str:
        """Compile a candidate, run it on all ranks, judge and time it.

        Args:
            code: Full Python source that defines solution().

        Returns:
            What came of it, and how many attempts are left.
        """
        if self.episode.over:
            return _OVER
        observation, _reward, terminated, truncated, info = self._env.step(code)
        self.episode.scores.append(info["total"])
        self.episode.statuses.append(info["verdict"]["status"])
        self.episode.over = terminated or truncated
        left = _OVER if self.episode.over else f"Attempts left: {observation['turns_left']}."
        return f"{observation['feedback']}\n{left}"


def worth(environment: KernelEnvironment) -> float | None:
    """The best score of an episode; None when nothing could be scored."""
    if not environment.episode.scores:
        environment.submit("")
    return max((score for score in environment.episode.scores if score is not None), default=None)


def best_attempt(
    environments: Sequence[KernelEnvironment],
    log_extra: Callable[[str, list[Any]], None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **_: object,
) -> list[float | None]:
    """A reward function for TRL: what every episode is worth; None: unscored."""
    found = [worth(environment) for environment in environments]
    statuses = [environment.episode.statuses for environment in environments]
    if log_extra:
        log_extra("statuses", [" ".join(each) for each in statuses])
    if log_metric:
        log_metric("kernels/attempts", sum(map(len, statuses)) / len(statuses))
        log_metric("kernels/correct", sum("CORRECT" in each for each in statuses) / len(statuses))
        log_metric("kernels/unscored", found.count(None) / len(statuses))
    return found


class KernelSpec:
    """What a trainer needs, in the form of TRL's own specs.

    Args:
        kernels: which problems, how candidates run, what they are worth.
        max_turns: attempts in one episode.

    Raises:
        UsageError: a problem, backend or size does not exist or does not fit.
    """

    def __init__(self, kernels: KernelArguments, max_turns: int = 4) -> None:
        self._kernels, self._max_turns = kernels, max_turns
        self._slugs = [row["problem"] for row in kernels.rows()]

    @property
    def train_dataset(self) -> Dataset:
        """One row per problem; the task itself comes from the environment."""
        ask = [{"role": "user", "content": "Solve the task below; call the tool `submit` with the whole source.\n\n"}]
        return Dataset.from_list([{"prompt": ask, "problem": slug} for slug in self._slugs])

    @property
    def environment_factory(self) -> Callable[[], KernelEnvironment]:
        """Makes environments; it survives pickling."""
        return partial(KernelEnvironment, self._kernels, self._max_turns)

    @property
    def reward_funcs(self) -> list[Callable[..., list[float | None]]]:
        """What episodes are worth."""
        return [best_attempt]
