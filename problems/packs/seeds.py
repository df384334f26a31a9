"""Random values of somebody else's code, drawn from our secret: whatever it seeds, nobody can guess what it draws.

A seed that the code names becomes another one, hashed from it and the secret: equal seeds stay equal, also on other ranks, and
different ones different, so who shares values with whom stays as it was meant.  Code that seeds nothing draws from a seed of
its rank.  Afterwards the global generators are as they were.
Not here: which code (`public`); generators that are reached past torch's, numpy's and Python's functions.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from problems.base import Draw

_draws: list[Draw] = []
"""Of the call that is under way, and once more within a function that seeds by calling another one."""
_NUMPY_BITS, _BITS = 32, 63


def install() -> None:
    """Let every way to seed ask who draws; once per process, before the code is imported, which may keep the functions."""
    if torch.Generator is _Generator:
        return
    for module in (torch, torch.random, torch.cuda):
        _replace(module, "manual_seed", _BITS)
    _replace(torch.cuda, "manual_seed_all", _BITS)
    _replace(random, "seed", _BITS)
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy.random")  # which numpy itself puts off
    if numpy := _numpy():
        _replace(numpy, "seed", _NUMPY_BITS)
        _replace(numpy, "default_rng", _NUMPY_BITS)
        numpy.RandomState = _hiding(numpy.RandomState)
    torch.Generator = _Generator  # type: ignore[misc]
    random.Random = _Random  # type: ignore[misc]


@contextlib.contextmanager
def drawn_from(draw: Draw) -> Iterator[None]:
    """Within the block all randomness comes from the secret of `draw`."""
    numpy, python = _numpy(), random.getstate()
    before = numpy.get_state() if numpy else None
    _draws.append(draw)
    try:
        with torch.random.fork_rng([torch.device(draw.device)] if draw.device.startswith("cuda") else []):
            torch.manual_seed(draw.rank)
            random.seed(draw.rank)
            if numpy:
                numpy.seed(draw.rank)
            yield
    finally:
        _draws.pop()
        random.setstate(python)
        if numpy:
            numpy.set_state(before)


class _Generator(torch.Generator):
    """A generator whose seeds are hidden too."""

    def manual_seed(self, seed: int) -> torch.Generator:
        return super().manual_seed(_hidden(seed, _BITS))


class _Random(random.Random):
    """Likewise of Python's."""

    def seed(self, a: Any = None, version: int = 2) -> None:
        super().seed(_hidden(a, _BITS), version)


def _hiding(state: type[Any]) -> type[Any]:
    """Numpy's older generator, likewise; a class, because others ask what is one."""

    def init(self: Any, seed: Any = None) -> None:
        state.__init__(self, _hidden(seed, _NUMPY_BITS))

    return type("RandomState", (state,), {"__init__": init})


def _numpy() -> Any:
    """Numpy's random functions, where there are any."""
    return sys.modules.get("numpy.random")


def _replace(module: Any, name: str, bits: int) -> None:
    original: Callable[..., Any] = getattr(module, name)

    def asks(seed: Any = None, *args: Any, **kwargs: Any) -> Any:
        hidden = _hidden(seed, bits)
        kept, _draws[:] = _draws[:], []  # what the original calls shall not hide it again
        try:
            return original(*(() if hidden is None else (hidden,)), *args, **kwargs)
        finally:
            _draws[:] = kept

    setattr(module, name, asks)


def _hidden(seed: Any, bits: int) -> Any:
    """The seed in the place of one that the code names; one of its own rank where it names none."""
    if not _draws:
        return seed
    draw = _draws[-1]
    name = f"entropy of rank {draw.rank}" if seed is None else f"seed {seed!r}"
    return draw.seed(name) % (1 << bits)
