"""How the public benchmark's `create_input_tensor` is called, and what may come of it.

Its parameters are told apart by their names; one that is unknown and has no default ends in an error.  A tuple that it returns
holds the arguments of `solution`; so does a list, unless `solution` takes one argument and the list does not hold exactly one
thing; a dict names them; anything else is the only argument.  Arguments that are left out become the defaults of `solution`.
Not here: seeds (`seeds`), where the function comes from (`public`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from problems.base import Draw, Size
from problems.packs.layout import MAKER, Entry, PackError

_NAMES = {
    "id": ("problem_id", "problem", "pid", "id", "problem_number", "problem_num", "number", "task_id", "problem_idx"),
    "stem": ("problem_name", "name", "stem", "reference_name"),
    "slug": ("slug",),
    "rank": ("rank", "local_rank", "rank_id", "r"),
    "world_size": ("world_size", "world", "nproc", "num_ranks", "n_ranks", "nranks", "num_gpus", "W"),
    "rows": ("m", "M", "rows", "num_rows", "dim_m", "height"),
    "columns": ("n", "N", "cols", "columns", "num_cols", "dim_n", "width"),
    "shape": ("shape", "size", "base_shape", "dims", "input_shape"),
    "dtype": ("dtype", "data_type", "torch_dtype"),
    "device": ("device", "dev"),
    "trial": ("trial", "trial_idx", "trial_index", "trial_id", "trial_num", "iteration"),
    "seed": ("seed", "base_seed", "random_seed"),
}
"""Fact -> names of the parameter that wants it."""
_FACT = {name: fact for fact, names in _NAMES.items() for name in names}
_PLAIN = (type(None), bool, int, float, str)


def check(function: Callable[..., Any]) -> None:
    """Whether all that the function wants is known.

    Raises:
        PackError: names what is not.
    """
    unknown = [p.name for p in inspect.signature(function).parameters.values() if _wanted(p) and p.name not in _FACT]
    if unknown:
        known = ", ".join(names[0] for names in _NAMES.values())
        came = f"{MAKER}{inspect.signature(function)}"
        raise PackError(f"{came} wants {', '.join(unknown)}, which nobody knows here; known are {known}")


def _wanted(parameter: inspect.Parameter) -> bool:
    variable = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and not variable


def called(function: Callable[..., Any], entry: Entry, draw: Draw, size: Size) -> Any:
    """What the function makes for one rank of one trial."""
    rows, columns = size["M"], size["N"]
    facts = {
        "id": entry.number, "stem": entry.file.stem, "slug": entry.slug, "rank": draw.rank, "world_size": draw.world_size,
        "rows": rows, "columns": columns, "shape": (rows, columns), "dtype": draw.dtype, "device": torch.device(draw.device),
        "trial": draw.trial, "seed": draw.seed("seed"),
    }  # fmt: skip
    positional, named = list[Any](), dict[str, Any]()
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in _FACT:
            continue  # left at its default
        value = _as_wanted(parameter, facts[_FACT[parameter.name]])
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            positional.append(value)
        else:
            named[parameter.name] = value
    return function(*positional, **named)


def _as_wanted(parameter: inspect.Parameter, value: Any) -> Any:
    """As text where the annotation or the default says so."""
    wants_text = parameter.annotation in (str, "str") or isinstance(parameter.default, str)
    return str(value).removeprefix("torch.") if wants_text else value


@dataclass(frozen=True)
class Signature:
    """What `solution` takes, in order."""

    names: tuple[str, ...]
    required: int
    defaults: tuple[Any, ...]
    """Of the rest."""

    @classmethod
    def of(cls, solution: Callable[..., Any]) -> Signature:
        """Without what can be passed by name only.

        Raises:
            PackError: it wants something that cannot be handed over in order.
        """
        parameters = inspect.signature(solution).parameters.values()
        if extra := [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY and _wanted(p)]:
            raise PackError(f"solution wants {', '.join(extra)} by name; arguments are handed over in order")
        placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        defaults = tuple(p.default for p in placed if not _wanted(p))
        return cls(tuple(p.name for p in placed), len(placed) - len(defaults), defaults)

    def arguments(self, made: Any, device: str) -> tuple[Any, ...]:
        """The arguments of one call, complete, as plain tensors on that device and values.

        Raises:
            PackError: they do not fit, or hold something that cannot be handed to another process.
        """
        given = self._given(made)
        missing = len(self.names) - len(given)
        if missing < 0 or len(given) < self.required:
            raise PackError(f"{MAKER} makes {len(given)} arguments, solution takes {', '.join(self.names)}")
        whole = given + (self.defaults[-missing:] if missing else ())
        complete = tuple(_portable(value, name, device) for value, name in zip(whole, self.names, strict=True))
        if not any(True for value in complete for _ in _tensors(value)):
            raise PackError(f"{MAKER} makes no tensor: it returned {type(made).__name__}")
        return complete

    def _given(self, made: Any) -> tuple[Any, ...]:
        if isinstance(made, dict):
            return self._named(made)
        alone = isinstance(made, list) and len(self.names) == 1 and len(made) != 1
        return tuple(made) if isinstance(made, tuple | list) and not alone else (made,)

    def _named(self, made: dict[Any, Any]) -> tuple[Any, ...]:
        if unknown := [str(key) for key in made if key not in self.names]:
            raise PackError(f"{MAKER} makes {', '.join(unknown)}, solution takes {', '.join(self.names)}")
        known = dict(zip(self.names[self.required :], self.defaults, strict=True)) | made
        return tuple(known[name] for name in self.names if name in known)


def _portable(value: Any, where: str, device: str) -> Any:
    """The same value out of what crosses from process to process: strided tensors, plain values, lists, tuples, dicts."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return value.detach().to(device)
    if isinstance(value, tuple | list):
        parts = [_portable(each, f"{where}[{i}]", device) for i, each in enumerate(value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _portable(each, f"{where}[{key!r}]", device) for key, each in value.items()}
    if type(value) in _PLAIN:
        return value
    kind = f"a tensor in layout {value.layout}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise PackError(f"argument {where} is {kind}, which cannot be handed to a process behind walls: the problem cannot be run")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)
