"""What a rank says, cut to what may be passed on: a message of the supervisor's own must fit and be readable, whatever is in it.

Not here: who says what when (`group`), what it means (`pkb_env.told`, `pkb_env.build_order`).
"""

from __future__ import annotations

from typing import Any

_NAMES, _CHARS = ("phase", "type", "text", "line", "function", "log"), 80_000
"""Of what ranks tell of their failures, and how much of each text over all ranks; JSON takes up to 12 bytes for a character."""
_MOST_REQUESTS, _MOST_LEVELS = 64, 3
"""Build requests for each rank of a group, and how deep one is: who reads a deeper one may have less stack than who wrote it."""


def failure(body: dict[str, Any], world_size: int) -> dict[str, Any]:
    """What is kept of a rank's message about its failure."""
    known, most = {name: body.get(name) for name in _NAMES}, _CHARS // world_size
    texts = {name: value[:most] for name, value in known.items() if isinstance(value, str)}
    return texts | {name: value for name, value in known.items() if isinstance(value, int)}


def check_request(request: object, requests: float) -> None:
    """Refuse a build request that is nested too deep, or one too many; `requests`: so many for each rank, this one included.

    Raises:
        ValueError: says why.
    """
    if requests > _MOST_REQUESTS:
        raise ValueError(f"more than {_MOST_REQUESTS} build requests a rank")
    if _deeper(request, _MOST_LEVELS):
        raise ValueError(f"a request with more than {_MOST_LEVELS} levels")


def _deeper(value: object, most: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(inside) and (most == 0 or any(_deeper(each, most - 1) for each in inside))
