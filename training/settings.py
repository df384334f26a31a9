"""What a training script is told about kernels: which problems, how candidates run, what they are worth, where rollouts go.

Not here: what trainers and models are told (TRL's own configurations).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pkb_env import topology
from pkb_env.config import EvalConfig
from pkb_env.errors import PkbError, UsageError
from pkb_env.problem_set import fitting, problem_set
from pkb_env.prompt import short_prompt, task_prompt
from pkb_env.submission import Submission
from problems.base import Problem
from training import devices

PROMPTS = ("task", "short")


@contextmanager
def told() -> Iterator[None]:
    """What a user can put right is one line on standard error and exit code 2."""
    try:
        yield
    except (PkbError, FileNotFoundError) as error:
        print(f"pkb: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def folder(name: str) -> str:
    """A model's folder, or its name on a hub.

    Raises:
        UsageError: it looks like a folder, and there is none.
    """
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        raise UsageError(f"there is no model folder {name}; name one that holds a config.json, or a model of a hub")
    return name


def last_checkpoint(output: str) -> str | None:
    """The last checkpoint that was written to its end (its state is written last); None: there is none, training begins anew."""
    steps = [(int(found.name.rpartition("-")[2]), found) for found in Path(output).glob("checkpoint-*[0-9]") if _whole(found)]
    return str(max(steps)[1]) if steps else None


def _whole(checkpoint: Path) -> bool:
    try:
        return bool(json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False


@dataclass
class KernelArguments:
    """Command-line arguments about kernels."""

    problems: list[str] = field(default_factory=lambda: ["train"], metadata={"help": "names, a split, or all"})
    backend: str = field(default="torch", metadata={"help": "torch, cpp (CPU), cuda, triton (GPUs)"})
    world_size: int = field(default=2, metadata={"help": "number of ranks"})
    topology: str = field(default="cpu", metadata={"help": "cpu, node, shared or auto"})
    size: str = field(default="default", metadata={"help": "named size"})
    profile: str = field(default="hardened", metadata={"help": "hardened, or upstream"})
    reward: str = field(default="default", metadata={"help": "a preset, or a TOML file"})
    store: str = field(default="rollouts.db", metadata={"help": "where verdicts and rollouts are kept"})
    deadline_s: float = field(default=600.0, metadata={"help": "most seconds that a step's evaluations may take"})
    trials: int = field(default=5, metadata={"help": "judged untimed calls of a candidate"})
    pairs: int = field(default=32, metadata={"help": "most timed pairs of a group; 0: no speed is paid"})
    prompt: str = field(default="task", metadata={"help": "task, or short: one line, for models that know what it means"})

    evaluation_devices: str = field(default="", metadata={"help": "GPUs that evaluate, such as 4,5,6,7; none of the trainer's"})
    share_device: bool = field(default=False, metadata={"help": "let the trainer's GPUs evaluate too; times are of a shared GPU"})

    @property
    def settings(self) -> Submission:
        """What every submission has in common."""
        where = topology.named(self.topology, self.world_size, devices.numbers(self.evaluation_devices))
        return Submission("", "", self.backend, self.world_size, where, self.profile, self.size)

    @property
    def config(self) -> EvalConfig:
        """How candidates are evaluated."""
        return EvalConfig(trials=self.trials, pairs=self.pairs)

    def placed(self, *, use_cpu: bool = False) -> EvalConfig:
        """The same with the GPUs that evaluate beside a trainer, which is on the CPU or not.

        Raises:
            UsageError: the trainer uses one of them, or they are not here.
        """
        where, share = self.settings, self.share_device
        gpus = devices.for_evaluation(where.topology, where.world_size, self.evaluation_devices, share=share, use_cpu=use_cpu)
        topology.settled(where, gpus)
        return self.config.model_copy(update={"gpus": gpus})

    def rows(self, max_turns: int = 1) -> list[dict[str, Any]]:
        """One row per problem: a conversation that asks for it, and its name.

        Raises:
            UsageError: a problem, backend or size does not exist or does not fit.
        """
        found = fitting(problem_set(self.problems), world_size=self.world_size, size=self.size, profile=self.profile)
        prompts = ((self.prompt_of(problem, self.settings, max_turns), problem.slug) for problem in found)
        return [{"prompt": [{"role": "user", "content": prompt}], "problem": slug} for prompt, slug in prompts]

    def prompt_of(self, problem: Problem, where: Submission, max_turns: int = 1) -> str:
        """What a policy is asked.

        Raises:
            UsageError: there is no such kind of prompt.
        """
        if self.prompt not in PROMPTS:
            raise UsageError(f"--prompt {self.prompt}: wanted {' or '.join(PROMPTS)}")
        return short_prompt(problem, where) if self.prompt == "short" else task_prompt(problem, where, self.config, max_turns)
