"""What the process of a candidate told about itself, made fit to show: nothing in it is trusted to be there or to be text.

Cut to size, without control characters, without lone surrogates (no database takes them) and without the folders of this
machine: an absolute path of three or more parts keeps its last one.
Not here: what follows from it (`outcome`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PATH = re.compile(r"(?:(?<![\w/.])|(?<=-[A-Z]))(?:/[\w.+@~=-]+){2,}/([\w.+@~=-]+)")
_LAST_LINE = 1_000_000


def clean(text: Any, limit: int = 20_000) -> str:
    """Any value as text that can be stored and shown; anything but a string gives an empty one."""
    if not isinstance(text, str):
        return ""
    whole = text[: 4 * limit].encode("utf-8", "replace").decode("utf-8", "replace")
    return _PATH.sub(r".../\1", _CONTROL.sub("", whole))[:limit]


@dataclass(frozen=True)
class Raised:
    """An exception, as the rank that raised it told it."""

    type: str
    text: str
    line: int | None
    """1-based line of the candidate."""
    function: str
    """Empty when unknown."""
    log: str
    """What a compiler said; empty unless the exception carries it."""

    def __str__(self) -> str:
        return f"{self.type}: {self.text}" if self.text else self.type

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Self:
        """From the message of a rank, whatever is in it."""
        line = told.get("line")
        return cls(
            type=clean(told.get("type"), 100) or "an exception without a name", text=clean(told.get("text"), 2000).strip(),
            line=line if type(line) is int and 0 < line < _LAST_LINE else None,
            function=clean(told.get("function"), 100), log=clean(told.get("log")),
        )  # fmt: skip
