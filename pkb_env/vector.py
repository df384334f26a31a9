"""Many episodes at once: a step evaluates its whole batch concurrently through one evaluator.

Episodes are not reset by themselves (a text sent to a finished one would be thrown away): reset those that ended with
`reset(options={"reset_mask": terminated | truncated})`.

Not here: what an episode is (`env`), how an evaluator shares the machine (`evaluator`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from numpy.typing import NDArray

from pkb_env.config import EvalConfig
from pkb_env.env import Observation, ParallelKernelEnv, open_evaluator
from pkb_env.errors import UsageError
from pkb_env.protocol import Evaluates
from pkb_env.submission import Submission
from rewards.verdict import Verdict

Bools = NDArray[np.bool_]
Infos = dict[str, Any]


class ParallelKernelVectorEnv(VectorEnv[Observation, Sequence[str], NDArray[Any]]):
    """A batch of episodes.

    Args:
        num_envs: number of episodes.
        evaluator: as in `ParallelKernelEnv`; all episodes share it.
        config: fields of `EvalConfig` that differ from the defaults; None: those of the evaluator that is handed in.
        render_mode: `ansi` or None.
        settings: everything else that `ParallelKernelEnv` takes.

    Raises:
        UsageError: something that is named does not exist or does not fit.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED, "render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012  as in Gymnasium

    def __init__(
        self,
        num_envs: int = 1,
        *,
        evaluator: Evaluates | str | None = None,
        config: Mapping[str, Any] | EvalConfig | None = None,
        render_mode: str | None = None,
        **settings: Any,
    ) -> None:
        if num_envs < 1:
            raise UsageError(f"num_envs={num_envs} leaves no episode; wanted 1 or more")
        self._config = EvalConfig.of(getattr(evaluator, "config", None) if config is None else config)
        self._given, self._evaluator = evaluator, None if evaluator is None or isinstance(evaluator, str) else evaluator
        self._envs = [ParallelKernelEnv(config=self._config, render_mode=render_mode, **settings) for _ in range(num_envs)]
        self.num_envs, self.render_mode = num_envs, render_mode
        self.single_observation_space = self._envs[0].observation_space
        self.single_action_space = self._envs[0].action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._observations: list[Observation] = []
        self._done = np.ones(num_envs, np.bool_)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Infos]:
        """Begin all episodes, or those of `options["reset_mask"]`; the others' observations stay as they were.

        Args:
            seed: one number (episode i gets seed + i), or one for each episode.
            options: `reset_mask`: bool array [num_envs]; `problem`: one name for all, or a list with one for each.

        Raises:
            UsageError: a mask, seeds or problems of another length, or a partial reset before the first whole one.
        """
        mask = self._mask((options or {}).get("reset_mask"))
        seeds = self._each("seed", _counted(seed, self.num_envs))
        problem = (options or {}).get("problem")
        names = self._each("problem", [problem] * self.num_envs if problem is None or isinstance(problem, str) else problem)
        infos: list[Infos | None] = [None] * self.num_envs
        if not self._observations:
            self._observations = [{} for _ in self._envs]
        for i in np.flatnonzero(mask):
            self._observations[i], infos[i] = self._envs[i].reset(seed=seeds[i], options={"problem": names[i]})
        self._done[mask] = False
        return self._batch(), _batch_infos(infos)

    def step(self, actions: Sequence[str]) -> tuple[Observation, NDArray[np.float64], Bools, Bools, Infos]:
        """One text for each episode, evaluated concurrently.

        Raises:
            gymnasium.error.ResetNeeded: an episode is over.
            UsageError: not one action for each episode.
        """
        if isinstance(actions, str) or len(actions) != self.num_envs:
            came = f"{type(actions).__name__} of length {len(actions)}"
            raise UsageError(f"wanted a sequence of {self.num_envs} texts, one for each episode; came a {came}")
        if self._done.any():
            over = ", ".join(map(str, np.flatnonzero(self._done)))
            wanted = "reset(options={'reset_mask': terminated | truncated})"
            raise gymnasium.error.ResetNeeded(f"episodes {over} are over; call {wanted}")
        prepared = [env.prepare(action) for env, action in zip(self._envs, actions, strict=True)]
        steps = [env.advance(verdict) for env, verdict in zip(self._envs, self._verdicts(prepared), strict=True)]
        self._observations = [step[0] for step in steps]
        terminated, truncated = (np.array([step[k] for step in steps], np.bool_) for k in (2, 3))
        self._done = terminated | truncated
        rewards = np.array([step[1] for step in steps], np.float64)
        return self._batch(), rewards, terminated, truncated, _batch_infos([step[4] for step in steps])

    def render(self) -> tuple[str | None, ...]:  # type: ignore[override]
        """What each episode renders."""
        return tuple(env.render() for env in self._envs)

    def close_extras(self, **kwargs: Any) -> None:  # noqa: ARG002  Gymnasium's signature
        """Close the evaluator, unless it was handed in."""
        owned = self._given is None or isinstance(self._given, str)
        if owned and self._evaluator is not None:
            self._evaluator.close()
            self._evaluator = None

    def _verdicts(self, prepared: list[Submission | Verdict]) -> list[Verdict]:
        """The verdicts in order; those that are none yet are evaluated together."""
        submissions = [each for each in prepared if isinstance(each, Submission)]
        if submissions and self._evaluator is None:
            self._evaluator = open_evaluator(self._given, self._config)
        found = iter(self._evaluator.evaluate_many(submissions) if submissions and self._evaluator is not None else [])
        return [next(found) if isinstance(each, Submission) else each for each in prepared]

    def _mask(self, given: Any) -> Bools:
        if given is None:
            return np.ones(self.num_envs, np.bool_)
        mask = np.asarray(given)
        if mask.dtype != np.bool_ or mask.shape != (self.num_envs,) or not mask.any():
            raise UsageError(f"reset_mask must be a bool array of length {self.num_envs} with at least one True; came {given!r}")
        if not self._observations and not mask.all():
            raise UsageError("reset_mask leaves out episodes that were never begun; call reset() for all first")
        return mask

    def _each(self, what: str, values: Any) -> list[Any]:
        if len(values) != self.num_envs:
            raise UsageError(f"{what} has {len(values)} entries, wanted {self.num_envs}, one for each episode")
        return list(values)

    def _batch(self) -> Observation:
        out: Any = create_empty_array(self.single_observation_space, self.num_envs)
        batch: Any = concatenate(self.single_observation_space, self._observations, out)
        return dict(batch)


def _counted(seed: Any, count: int) -> Any:
    """One seed as one for each episode; anything else as it is."""
    if seed is None:
        return [None] * count
    return [int(seed) + i for i in range(count)] if isinstance(seed, int | np.integer) else seed


def _batch_infos(infos: Sequence[Infos | None]) -> Infos:
    """Every key as an array of objects, one entry for each episode, with its mask `_key`; a verdict stays whole."""
    batch: Infos = {}
    for key in dict.fromkeys(key for info in infos for key in info or ()):
        batch[key], batch[f"_{key}"] = np.full(len(infos), None, object), np.zeros(len(infos), np.bool_)
        for i, info in enumerate(infos):
            if info is not None and key in info:
                batch[key][i], batch[f"_{key}"][i] = info[key], True
    return batch
