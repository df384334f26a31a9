"""Policies: what answers prompts.  A name -> path table; a policy's file, and what it needs, is imported when it is opened.

    hf:PATH          a Hugging Face model folder on this machine
    openai:MODEL     a model behind an OpenAI-compatible endpoint, at `Sampling.base_url`
    folder:PATH      solution files that are there already

A new kind is one file with `open_policy(rest, sampling, backend) -> Policy` and one line in `_FILES`.

Not here: which prompts are asked and what becomes of the answers (`policy_run`); stores, which answer nothing (`policy_record`).
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pkb_env.errors import UsageError

_FILES = {
    "hf": "pkb_env.policies.hugging_face",
    "openai": "pkb_env.policies.endpoint",
    "folder": "pkb_env.policies.folder",
}


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn."""

    temperature: float = 1.0
    """0 takes the likeliest token always."""
    top_p: float = 1.0
    max_new_tokens: int = 4096
    seed: int | None = None
    """None: a model on this machine takes 0, an endpoint is not told any."""
    at_once: int = 8
    """Sequences of a batch, or requests that are open at once; it decides no answer of an endpoint."""
    base_url: str = ""
    key_variable: str = "OPENAI_API_KEY"
    """The environment variable that holds the endpoint's key."""


@dataclass(frozen=True)
class Ask:
    """One answer that is wanted."""

    problem: str
    sample: int
    turn: int
    said: tuple[str, ...]
    """Prompt, answer, feedback, answer, ..., feedback: the policy speaks next."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """The same as a chat."""
        return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(self.said)]

    def seed(self, of: int) -> int:
        """A seed of its own, so that no two samples are drawn alike."""
        text = f"{of} {self.problem} {self.sample} {self.turn}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


class Policy(Protocol):
    """What answers prompts."""

    turns: bool
    """Whether it can answer feedback."""

    def setting(self) -> dict[str, Any]:
        """What decides its answers, as plain data without secrets; equal settings may share an output folder."""
        ...

    def draw(self, asks: Sequence[Ask]) -> Iterator[tuple[Ask, str]]:
        """Answers as they come, in any order; an ask that cannot be answered is left out.

        Raises:
            PkbError: no more answers can be had now; those that came before count.
        """
        ...

    def close(self) -> None:
        """Free memory and connections; the next `draw` takes them again."""
        ...


def open_policy(name: str, sampling: Sampling, backend: str) -> Policy:
    """The policy that a text names.

    Raises:
        UsageError: no such kind, or nothing of that kind is there.
    """
    kind, colon, rest = name.partition(":")
    if kind not in _FILES or not colon or not rest:
        raise UsageError(f"policy {name!r} is none; give hf:FOLDER, openai:MODEL, folder:FOLDER or store:PATH")
    found: Policy = importlib.import_module(_FILES[kind]).open_policy(rest, sampling, backend)
    return found


def text_before(said: Sequence[str]) -> str:
    """A conversation as one text, for models that know no chat."""
    return "\n\n".join(said) + "\n"
