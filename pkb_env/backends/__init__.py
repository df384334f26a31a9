"""What a candidate is written in: one file per backend, loaded by name when asked for.

A new backend is one file that ends in `BACKEND = Backend(...)`, and one line in `_FILES`.

Not here: how a candidate is run (`sandbox`), where its ranks live (topologies).
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass

from pkb_env.errors import UsageError

_FILES = {
    "torch": "pkb_env.backends.torch",
    "cpp": "pkb_env.backends.cpp",
    "cuda": "pkb_env.backends.cuda",
    "triton": "pkb_env.backends.triton",
}
_LATER = ("parallelkittens",)
NAMES = (*_FILES, *_LATER)
"""Everything that a candidate may one day be written in."""


@dataclass(frozen=True)
class Backend:
    """The rules of one language."""

    name: str
    topologies: tuple[str, ...]
    """Where candidates of this backend can run: `cpu`, `node`, `shared`."""
    rules: str
    """What a policy may use, as Markdown list items."""
    toy: str
    """One sentence: what the example computes.  No problem asks for the same."""
    example: str
    """A complete candidate that solves the toy operation."""


def names(topology: str = "cpu") -> tuple[str, ...]:
    """The backends that run on a topology."""
    return tuple(name for name in _FILES if topology in load(name).topologies)


def load(name: str, topology: str | None = None) -> Backend:
    """A backend by name.

    Raises:
        UsageError: no such backend, or not on this topology.
    """
    if name not in _FILES:
        raise UsageError(_unknown(name))
    backend: Backend = importlib.import_module(_FILES[name]).BACKEND
    if topology is not None and topology not in backend.topologies:
        raise UsageError(f"backend {name!r} does not run on topology {topology!r}; it runs on {', '.join(backend.topologies)}")
    return backend


def _unknown(name: str) -> str:
    there = f"there are {', '.join(_FILES)}"
    if name in _LATER:
        return f"backend {name!r} is planned but not there yet; {there}"
    close = difflib.get_close_matches(str(name), NAMES, n=1)
    return f"unknown backend {name!r};{f' did you mean {close[0]!r}?' if close else ''} {there}"
