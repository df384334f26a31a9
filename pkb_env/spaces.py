"""A Gymnasium space for source code and prose: any str up to a length.

Gymnasium's own Text needs a set of characters, which no program keeps to, and returns garbage from shared memory.

Not here: what the text means (`submission`).
"""

from __future__ import annotations

import string
from typing import Any

import gymnasium
from numpy.random import Generator

_SAMPLED = string.ascii_letters + string.digits + " \n()=:_"
_SAMPLED_CHARS = 64


class SourceText(gymnasium.Space[str]):
    """Every str of at most `max_length` characters, whatever the characters; samples are short and ASCII.

    Raises:
        ValueError: a length below 1.
    """

    def __init__(self, max_length: int, seed: int | Generator | None = None) -> None:
        if max_length < 1:
            raise ValueError(f"max_length={max_length} leaves no room for a text; wanted 1 or more")
        self.max_length = max_length
        super().__init__(dtype=str, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: None = None, probability: None = None) -> str:  # noqa: ARG002  Gymnasium's signature
        """A short random text; it is hardly ever a candidate."""
        count = int(self.np_random.integers(1, min(self.max_length, _SAMPLED_CHARS) + 1))
        return "".join(_SAMPLED[i] for i in self.np_random.integers(len(_SAMPLED), size=count))

    def contains(self, x: Any) -> bool:
        """Whether x is a str that is short enough."""
        return isinstance(x, str) and len(x) <= self.max_length

    def __repr__(self) -> str:
        return f"SourceText({self.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SourceText) and other.max_length == self.max_length

    def __hash__(self) -> int:
        return hash((SourceText, self.max_length))
