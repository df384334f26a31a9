"""Chance with a seed: one of several ways to write the same, and names that no two things share.

Not here: what there is to choose from, but for names.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
_NAMES = {
    # C++
    "me": ("mine", "rank", "me", "self"),
    "world": ("world", "ranks", "world_size"),
    "peer": ("peer", "other", "from", "p"),
    "step": ("step", "hop", "s"),
    "group": ("group", "g", "comm"),
    "in": ("input", "x", "src", "in"),
    "out": ("output", "out", "dst", "result"),
    "n": ("n", "count", "numel", "elements"),
    "parts": ("parts", "sources", "terms"),
    "add": ("add_up", "sum_parts", "accumulate", "reduce_into"),
    "copy": ("copy_bytes", "move", "transfer", "copy"),
    # Python
    "lib": ("_lib", "lib", "_native", "_library", "kernels"),
    "memory": ("memory", "hdl", "handle", "shared", "symmetric"),
    "workspace": ("workspace", "scratch", "memory_for", "get_workspace", "symmetric_memory"),
    "output": ("output", "out", "result", "y"),
    "calls": ("_calls", "_turn", "_count", "_epoch"),
    "needed": ("nbytes", "needed", "size"),
}
"""For every role the names it goes by."""


class Choice:
    """The choices of one candidate; the same seed chooses the same.

    Args:
        seed: any text.
    """

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)  # noqa: S311  texts, not secrets

    def one(self, options: Sequence[T]) -> T:
        """Any of them."""
        return self._random.choice(options)

    def chance(self, share: float) -> bool:
        """True in so many of all cases."""
        return self._random.random() < share

    def some(self, options: Sequence[T], most: int) -> list[T]:
        """One to `most` of them, in their order."""
        count = min(len(options), self._random.randint(1, most))
        return [options[i] for i in sorted(self._random.sample(range(len(options)), count))]

    def names(self) -> dict[str, str]:
        """A name for every role."""
        return {role: self.one(names) for role, names in _NAMES.items()}
