"""A pack's problem with its code: for trusted processes that are there for one problem, the oracle's and its makers.

Not here: what a caller gets (`told`).
"""

from __future__ import annotations

import sys
from dataclasses import replace

from problems.base import Problem
from problems.packs import ours, public
from problems.packs.layout import PackError, look_at


def load(path: str, name: str, version: int, *, on_gpu: bool) -> Problem:
    """The problem that a caller knows by that name and version.

    Raises:
        PackError: it is not there, cannot be used, or its files have changed since.
    """
    sys.dont_write_bytecode = True  # packs are used in place, and stay as they are
    folder, slug = look_at(path), name.rpartition("/")[2]
    if folder.version(slug) != version:
        raise PackError(f"the files of {name} have changed since its pack was loaded; load it again")
    entry = folder.entry(slug)
    problem = public.load(public.Checkout(folder, on_gpu=on_gpu), entry) if folder.public else ours.load(folder, entry)
    return replace(problem, slug=name, version=version)
