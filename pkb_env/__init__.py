"""ParallelKernelBench as a reinforcement-learning environment.

`gymnasium.make("pkb/ParallelKernel-v0")` works after `import pkb_env`; the names below are loaded when first used.

Not here: problems (`problems`), rewards (`rewards`), training.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pkb_env.config import EvalConfig
    from pkb_env.env import ParallelKernelEnv
    from pkb_env.errors import HarnessError, InvalidSource, PkbError, UsageError
    from pkb_env.evaluator import Evaluator
    from pkb_env.prompt import feedback, task_prompt
    from pkb_env.protocol import Evaluates
    from pkb_env.recorded import RecordedEvaluator
    from pkb_env.store import Key, Rollout, Store
    from pkb_env.submission import Candidate, Submission
    from pkb_env.vector import ParallelKernelVectorEnv
    from rewards.verdict import Status, Verdict

_HOMES = {
    "Candidate": "pkb_env.submission",
    "EvalConfig": "pkb_env.config",
    "Evaluates": "pkb_env.protocol",
    "Evaluator": "pkb_env.evaluator",
    "HarnessError": "pkb_env.errors",
    "InvalidSource": "pkb_env.errors",
    "Key": "pkb_env.store",
    "ParallelKernelEnv": "pkb_env.env",
    "ParallelKernelVectorEnv": "pkb_env.vector",
    "PkbError": "pkb_env.errors",
    "RecordedEvaluator": "pkb_env.recorded",
    "Rollout": "pkb_env.store",
    "Status": "rewards.verdict",
    "Store": "pkb_env.store",
    "Submission": "pkb_env.submission",
    "UsageError": "pkb_env.errors",
    "Verdict": "rewards.verdict",
    "feedback": "pkb_env.prompt",
    "task_prompt": "pkb_env.prompt",
}

__all__ = [
    "Candidate",
    "EvalConfig",
    "Evaluates",
    "Evaluator",
    "HarnessError",
    "InvalidSource",
    "Key",
    "ParallelKernelEnv",
    "ParallelKernelVectorEnv",
    "PkbError",
    "RecordedEvaluator",
    "Rollout",
    "Status",
    "Store",
    "Submission",
    "UsageError",
    "Verdict",
    "feedback",
    "task_prompt",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pkb_env' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]


# Processes of the sandbox set this: they never make an environment and need not pay 0.2 s for Gymnasium.
if "PKB_NO_GYM" not in os.environ:
    from pkb_env.registration import register

    register()
