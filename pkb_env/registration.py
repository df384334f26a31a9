"""The one Gymnasium id.  Entry points are strings, so registering loads neither torch nor the environment.

Not here: the environment (`env`, `vector`).
"""

from __future__ import annotations

import gymnasium

ID = "pkb/ParallelKernel-v0"
"""`nondeterministic`, because times are measured; the version rises whenever rewards or observations mean something else."""


def register() -> None:
    """Register the id unless it is registered already."""
    if ID not in gymnasium.registry:
        gymnasium.register(
            id=ID,
            entry_point="pkb_env.env:ParallelKernelEnv",
            vector_entry_point="pkb_env.vector:ParallelKernelVectorEnv",
            nondeterministic=True,
        )
