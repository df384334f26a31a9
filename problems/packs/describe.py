"""The short-lived process that reads a pack for a caller who must not run its code.

    python -m problems.packs.describe FD    with {"path": ..., "slugs": [...]} on standard input

Each line on FD is a JSON object: `reading` before a file is touched, then what it tells or why it cannot be used; `end` last.
What the pack's code prints goes to standard error, with everything else that may end this process.
Not here: reading the lines (`told`).
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

from problems.base import Problem
from problems.packs import ours, public
from problems.packs.layout import INPUTS, Entry, Folder, PackError, look_at

WORLDS, ITEMSIZES = 64, (2, 4, 8)
"""World sizes from 1 on, and bytes per element, for which it is told whether a problem runs and what it costs."""
_PLAIN = ("number", "slug", "title", "family", "parallelism", "collectives", "origin", "split", "mutates")


def main() -> None:
    """Read what is asked for, tell it, end."""
    tell, order = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8"), json.load(sys.stdin)
    os.dup2(2, 1)
    sys.dont_write_bytecode = True
    folder = look_at(order["path"])
    checkout = public.Checkout(folder, on_gpu=False) if folder.public else None
    if checkout is not None:
        _say(tell, reading=str(INPUTS))
        try:
            _ = checkout.make
        except PackError as error:
            _say(tell, unusable=str(error))
            return
    for slug in order["slugs"]:
        _say(tell, reading=slug)
        try:
            _say(tell, slug=slug, told=_told(folder, checkout, folder.entry(slug)))
        except PackError as error:
            _say(tell, slug=slug, broken=str(error))
        except Exception as error:  # noqa: BLE001  what the pack's own functions raise when they are asked
            _say(tell, slug=slug, broken=f"{folder.entry(slug).file}: {ours.why(error, folder.root)}")
    _say(tell, end=True)


def _say(tell: Any, **body: Any) -> None:
    tell.write(json.dumps(body) + "\n")
    tell.flush()


def _told(folder: Folder, checkout: public.Checkout | None, entry: Entry) -> dict[str, Any]:
    if checkout is not None:
        problem = public.load(checkout, entry)
        assert problem.pack is not None
        references = checkout.source(entry), public.Checkout(folder, on_gpu=True).source(entry)
        return _fields(problem) | asdict(problem.pack) | {"references": references, "worlds": None, "costs": None}
    problem = ours.load(folder, entry)
    worlds = [problem.valid_world(world_size) for world_size in range(1, WORLDS + 1)]
    told = _fields(problem) | asdict(ours.packed(folder, entry, problem))
    return told | {"worlds": worlds, "costs": _costs(problem, worlds)}


def _fields(problem: Problem) -> dict[str, Any]:
    sizes = {name: dict(size.dims) for name, size in problem.sizes.items()}
    return {name: getattr(problem, name) for name in _PLAIN} | {"sizes": sizes, "tolerance": asdict(problem.tolerance)}


def _costs(problem: Problem, worlds: list[str | None]) -> dict[str, Any]:
    """Size -> bytes per element -> for each world size the three amounts, None where the problem does not run."""
    return {
        name: {
            str(itemsize): [
                None if reason else list(asdict(problem.cost(size, world_size, itemsize)).values())
                for world_size, reason in enumerate(worlds, 1)
            ]
            for itemsize in ITEMSIZES
        }
        for name, size in problem.sizes.items()
    }


if __name__ == "__main__":
    main()
