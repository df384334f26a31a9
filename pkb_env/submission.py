"""From a policy's text to a candidate.

Not here: what the source may contain (`screen`), how it is run (`evaluator`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Submission:
    """A policy's text, and where and how it is to be run.  Building one never fails for what a policy wrote."""

    text: str
    problem: str
    backend: str = "torch"
    world_size: int = 2
    topology: str = "cpu"
    profile: str = "hardened"
    size: str = "default"


@dataclass(frozen=True)
class Candidate:
    """The Python source that defines `solution`."""

    source: str

    @property
    def digest(self) -> str:
        """SHA-256 of the source, hexadecimal."""
        return hashlib.sha256(self.source.encode("utf-8", "surrogatepass")).hexdigest()
