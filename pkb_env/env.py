"""The Gymnasium environment: an action is a text, a step is one evaluation.

An episode is one problem and up to `max_turns` attempts; after each one the observation tells what came of it.  With one
turn it is a scored completion; with more, a step is a revision that has read the feedback.

Not here: evaluating (`evaluator`, `recorded`), what a verdict is worth (`rewards`), batches (`vector`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from pkb_env import backends
from pkb_env import topology as topologies
from pkb_env.config import EvalConfig
from pkb_env.errors import InvalidSource, UsageError
from pkb_env.problem_set import fitting, problem_set
from pkb_env.prompt import feedback, task_prompt
from pkb_env.protocol import Evaluates
from pkb_env.spaces import SourceText
from pkb_env.submission import MAX_TEXT_BYTES, Submission, code_in, invalid
from problems.base import Problem
from rewards.presets import get
from rewards.score import Reward, Score
from rewards.verdict import Status, Verdict

Observation = dict[str, Any]
MAX_PROMPT_CHARS = 1 << 18
MAX_REWARD = 1e6
"""Bound of the rewards and speed-ups shown in observations."""


def open_evaluator(evaluator: Evaluates | str | None, config: Mapping[str, Any] | EvalConfig | None) -> Evaluates:
    """The evaluator that an argument names: None is this machine, `recorded:PATH` a store.

    Raises:
        UsageError: another text, or no store at that path.
    """
    if evaluator is None:
        from pkb_env.evaluator import Evaluator  # noqa: PLC0415  starts processes, so only when one is needed

        return Evaluator(EvalConfig.of(config))
    if not isinstance(evaluator, str):
        return evaluator
    if not evaluator.startswith("recorded:"):
        raise UsageError(f"evaluator={evaluator!r} is unknown; give None, 'recorded:PATH' or an evaluator")
    from pkb_env.recorded import RecordedEvaluator  # noqa: PLC0415

    return RecordedEvaluator(evaluator.removeprefix("recorded:"), missing="unscored")


class ParallelKernelEnv(gymnasium.Env[Observation, str]):
    """One problem at a time; `reset` draws it.

    Args:
        problem: a name, a list of names, a split (`train`, `validation`, `test`), a rung (`rung-1` to `rung-5`),
            a rung of a split (`train/rung-1`) or `all`; `reset` draws one of them.
        backend: what candidates are written in.
        world_size: number of ranks.
        topology: where the ranks live.
        profile: `hardened` or `upstream`.
        size: named size of the inputs.
        max_turns: attempts in one episode.
        reward: a preset, a TOML file, or a callable (verdict, history) -> Score.
        evaluator: None for this machine, `recorded:PATH` for a store, or an open evaluator, which stays the caller's to close.
        config: fields of `EvalConfig` that differ from the defaults; None: those of the evaluator that is handed in.
        render_mode: `ansi` or None.

    Raises:
        UsageError: something that is named does not exist or does not fit.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012  Gymnasium declares it per instance

    def __init__(
        self,
        problem: str | Sequence[str] = "allreduce",
        *,
        backend: str = "torch",
        world_size: int = 2,
        topology: str = "cpu",
        profile: str = "hardened",
        size: str = "default",
        max_turns: int = 1,
        reward: str | Path | Reward = "default",
        evaluator: Evaluates | str | None = None,
        config: Mapping[str, Any] | EvalConfig | None = None,
        render_mode: str | None = None,
    ) -> None:
        if max_turns < 1:
            raise UsageError(f"max_turns={max_turns} leaves no attempt; wanted 1 or more")
        self._config = EvalConfig.of(getattr(evaluator, "config", None) if config is None else config)
        topology = topologies.named(topology, world_size, self._config.gpus)
        backends.load(backend, topology)
        self._problems = fitting(problem_set(problem), world_size=world_size, size=size, profile=profile)
        self._settings = Submission("", "", backend, world_size, topology, profile, size)
        self._reward = reward if callable(reward) else _reward(reward)
        if isinstance(evaluator, str):
            open_evaluator(evaluator, config).close()  # an unknown one, or a missing store, is said now
        self._given, self._evaluator = evaluator, None if evaluator is None or isinstance(evaluator, str) else evaluator
        self.max_turns, self.render_mode = max_turns, render_mode
        self.action_space = SourceText(MAX_TEXT_BYTES)
        self.observation_space = _observation_space(max_turns)
        self._problem: Problem | None = None
        self._over = True
        self._history: tuple[Verdict, ...] = ()
        self._best: Verdict | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        """Draw a problem with the environment's own generator, or take `options["problem"]`.

        Raises:
            UsageError: the named problem does not exist or does not fit.
        """
        super().reset(seed=seed)
        self._problem = self._draw((options or {}).get("problem"))
        self._submitted = replace(self._settings, problem=self._problem.slug)
        self._prompt = task_prompt(self._problem, self._submitted, self._config, self.max_turns)[:MAX_PROMPT_CHARS]
        self._feedback, self._history, self._over = "", (), False
        self._turn, self._best, self._best_reward, self._best_speedup = 0, None, 0.0, 0.0
        return self._observation(), {"problem": self._problem.slug}

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Evaluate one text.  Never raises for what a policy wrote; a failed harness truncates, with reward 0.0.

        Raises:
            gymnasium.error.ResetNeeded: the episode is over, or `reset` was never called.
        """
        prepared = self.prepare(action)
        return self.advance(prepared if isinstance(prepared, Verdict) else self._evaluates().evaluate(prepared))

    def prepare(self, action: object) -> Submission | Verdict:
        """What an action asks to be evaluated, or the verdict INVALID if it is no text at all."""
        if self._over or self._problem is None:
            raise gymnasium.error.ResetNeeded("the episode is over, or was never begun; call reset() first")
        self._submitted = replace(self._submitted, text=action if isinstance(action, str) else "")
        if isinstance(action, str):
            return self._submitted
        error = InvalidSource(f"the action is {type(action).__name__}, not a text; send the source as a str")
        return invalid(self._submitted, self._problem.version, error)

    def advance(self, verdict: Verdict) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Take the verdict of the prepared action into the episode."""
        score = self._reward(verdict, self._history)
        unscored = verdict.status is Status.INFRA or score.unscored
        total = 0.0 if unscored else float(score.total)
        self._turn += 1
        self._feedback = feedback(verdict, code_in(self._submitted.text))[:MAX_PROMPT_CHARS]
        if not unscored:
            self._remember(verdict, total)
        terminated = not unscored and self._turn >= self.max_turns
        self._over = terminated or unscored
        return self._observation(), total, terminated, unscored, self._info(verdict, score, unscored)

    def render(self) -> str | None:
        """The prompt before the first attempt, later the feedback."""
        if self.render_mode != "ansi" or self._problem is None:
            return None
        if not self._turn:
            return self._prompt
        best = f"best reward so far {self._best_reward:.3f}" if self._best is not None else "nothing scored yet"
        return f"[{self._problem.slug}] attempt {self._turn} of {self.max_turns}, {best}\n{self._feedback}"

    def close(self) -> None:
        """Close the evaluator, unless it was handed in."""
        owned = self._given is None or isinstance(self._given, str)
        if owned and self._evaluator is not None:
            self._evaluator.close()
            self._evaluator = None

    def _evaluates(self) -> Evaluates:
        if self._evaluator is None:
            self._evaluator = open_evaluator(self._given, self._config.model_dump())
        return self._evaluator

    def _draw(self, wanted: str | None) -> Problem:
        if wanted is None:
            return self._problems[int(self.np_random.integers(len(self._problems)))]
        fit = {"world_size": self._settings.world_size, "size": self._settings.size, "profile": self._settings.profile}
        found = fitting(problem_set(wanted), **fit)  # type: ignore[arg-type]
        return found[0] if len(found) == 1 else found[int(self.np_random.integers(len(found)))]

    def _remember(self, verdict: Verdict, total: float) -> None:
        self._history = (*self._history, verdict)
        if self._best is None or total > self._best_reward:
            self._best, self._best_reward = verdict, total
        self._best_speedup = max(self._best_speedup, verdict.speedup or 0.0)

    def _observation(self) -> Observation:
        return {
            "prompt": self._prompt,
            "feedback": self._feedback,
            "turn": np.int64(self._turn),
            "turns_left": np.int64(self.max_turns - self._turn),
            "best_reward": np.clip(np.array([self._best_reward], np.float32), -MAX_REWARD, MAX_REWARD),
            "best_speedup": np.clip(np.array([self._best_speedup], np.float32), 0.0, MAX_REWARD),
        }

    def _info(self, verdict: Verdict, score: Score, unscored: bool) -> dict[str, Any]:
        return {
            "problem": verdict.problem,
            "verdict": json.loads(verdict.to_json()),
            "terms": {term.name: {"score": term.score, "weight": term.weight} for term in score.terms},
            "total": None if unscored else float(score.total),
            "unscored": unscored,
        }


def _reward(name: str | Path) -> Reward:
    try:
        return get(name)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error


def _observation_space(max_turns: int) -> spaces.Dict:
    return spaces.Dict(
        {
            "prompt": SourceText(MAX_PROMPT_CHARS),
            "feedback": SourceText(MAX_PROMPT_CHARS),
            "turn": spaces.Discrete(max_turns + 1),
            "turns_left": spaces.Discrete(max_turns + 1),
            "best_reward": spaces.Box(-MAX_REWARD, MAX_REWARD, (1,), np.float32),
            "best_speedup": spaces.Box(0.0, MAX_REWARD, (1,), np.float32),
        }
    )
