"""From what a pack's process told to a problem as callers know it: all data, and not one function of the pack's.

Not here: asking (`told`), the same problem with its code (`inside`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from problems.base import Cost, Packed, Problem, Size, Tolerance, any_world
from problems.packs.layout import PackError

Body = dict[str, Any]


class _Lie(Exception):
    """Something told is not of the kind that was asked for."""


@dataclass(frozen=True)
class Worlds:
    """`valid_world`, told in advance."""

    reasons: tuple[str | None, ...]
    """From one rank on."""

    def __call__(self, world_size: int) -> str | None:
        if world_size < 1:
            return any_world(world_size)
        return self.reasons[world_size - 1] if world_size <= len(self.reasons) else f"known up to {len(self.reasons)} ranks only"


@dataclass(frozen=True)
class Costs:
    """`cost`, told in advance."""

    amounts: dict[str, dict[str, list[list[float] | None]]]

    def __call__(self, size: Size, world_size: int, itemsize: int) -> Cost:
        found = self.amounts[size.name][str(itemsize)][world_size - 1]
        if found is None:
            raise PackError(f"nobody told the cost of size {size.name!r} on {world_size} ranks")
        return Cost(*found)


def elsewhere(*_: Any) -> Any:
    """Stands for every function of a pack."""
    raise PackError("functions of a pack run in processes of their own, never in the caller's")


def problem(body: Any, pack: str, version: int) -> Problem:
    """The problem, named `pack/slug`.

    Raises:
        PackError: what was told is not of the kinds that the contract asks for.
    """
    try:
        return _problem(body, pack, version)
    except _Lie as lie:
        raise PackError(f"what it tells is not after problems.base: {lie}") from None
    except ValueError as error:
        raise PackError(str(error)) from None


def _problem(body: Any, pack: str, version: int) -> Problem:
    told = _of(body, dict, "all")
    packed = Packed(
        path=_text(told, "path"), arguments=_texts(told, "arguments"), statement=_text(told, "statement"),
        references=_pair(_texts(told, "references")), unknown=_texts(told, "unknown"),
    )  # fmt: skip
    plain = {name: _text(told, name) for name in ("title", "family", "parallelism", "origin", "split")}
    costs, worlds = told.get("costs"), told.get("worlds")
    return Problem(
        number=_of(told.get("number"), int, "number"), slug=f"{pack}/{_text(told, 'slug')}", version=version, **plain,
        collectives=_texts(told, "collectives"), mutates=_texts(told, "mutates"), sizes=_sizes(told.get("sizes")), pack=packed,
        make_inputs=elsewhere, reference=elsewhere, exact=elsewhere, tolerance=_tolerance(told.get("tolerance")),
        cost=elsewhere if costs is None else Costs(_costs(costs)),
        valid_world=any_world if worlds is None else Worlds(_worlds(worlds)),
    )  # fmt: skip


def _of(value: Any, kind: type, name: str) -> Any:
    if type(value) is not kind:
        raise _Lie(f"{name} is {type(value).__name__}, wanted {kind.__name__}")
    return value


def _text(told: Body, name: str) -> str:
    text: str = _of(told.get(name), str, name)
    return text


def _texts(told: Body, name: str) -> tuple[str, ...]:
    return tuple(_of(each, str, f"one of {name}") for each in _of(told.get(name), list, name))


def _pair(texts: Sequence[str]) -> tuple[str, str]:
    if len(texts) != 2:
        raise _Lie("references is not two texts")
    return texts[0], texts[1]


def _sizes(told: Any) -> dict[str, Size]:
    sizes = {}
    for name, dims in _of(told, dict, "sizes").items():
        extents = _of(dims, dict, f"size {name}").items()
        sizes[name] = Size(name, {axis: _of(extent, int, f"extent {axis} of size {name}") for axis, extent in extents})
    return sizes


def _tolerance(told: Any) -> Tolerance:
    known = {f.name: f.default for f in fields(Tolerance)}
    given = _of(told, dict, "tolerance")
    if set(given) != set(known):
        raise _Lie(f"tolerance has {sorted(given)}")
    numbers = {name: _number(value, f"tolerance {name}") for name, value in given.items() if name != "bits"}
    return Tolerance(_of(given["bits"], bool, "tolerance bits"), **numbers)


def _number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise _Lie(f"{name} is {value!r}, wanted a number >= 0")
    return float(value)


def _worlds(told: Any) -> tuple[str | None, ...]:
    return tuple(each if each is None else _of(each, str, "one of valid_world") for each in _of(told, list, "worlds"))


def _costs(told: Any) -> dict[str, dict[str, list[list[float] | None]]]:
    return {
        name: {
            itemsize: [_amounts(each, name) for each in _of(row, list, f"cost of size {name}")]
            for itemsize, row in _of(table, dict, f"cost of size {name}").items()
        }
        for name, table in _of(told, dict, "costs").items()
    }


def _amounts(told: Any, size: str) -> list[float] | None:
    if told is None:
        return None
    amounts = [_number(each, f"cost of size {size}") for each in _of(told, list, f"cost of size {size}")]
    if len(amounts) != len(fields(Cost)):
        raise _Lie(f"cost of size {size} has {len(amounts)} amounts")
    return amounts
