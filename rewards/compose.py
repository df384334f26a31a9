"""From terms to a reward, also read from a TOML file.

    name = "mine"
    advantage = "dr_grpo"
    [[terms]]
    kind = "status_floor"
    [[terms]]
    kind = "log_speed"
    weight = 0.5
    high = 3.0

A new kind of term is one class and one entry in `KINDS`.

Not here: what a term computes (`correctness`, `speed`, `coverage`), the rewards that have names (`presets`).
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

from rewards.advantage import ADVANTAGES
from rewards.correctness import Correct, StatusFloor
from rewards.coverage import Coverage
from rewards.score import History, Score, Scorer, Term
from rewards.speed import Faster, Levels, LogSpeed, SpeedOfLight, Speedup
from rewards.verdict import Status, Verdict

KINDS: Mapping[str, type[Scorer]] = {
    k.kind: k for k in (StatusFloor, Correct, LogSpeed, Speedup, Faster, Levels, SpeedOfLight, Coverage)
}
"""Kinds of terms a TOML file can name."""

_TEXTS = (("name", None), ("about", ""), ("advantage", "grpo"))
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class Part:
    """A scorer, its weight, and the name of its term (default: the scorer's kind)."""

    scorer: Scorer
    weight: float = 1.0
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.scorer.kind)
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(f"weight of {self.name!r} is {self.weight!r}, wanted a finite number >= 0")


@dataclass(frozen=True, slots=True)
class Composed:
    """A weighted sum of terms.  INFRA is unscored whatever the terms are.

    Raises:
        ValueError: no part, two parts of one name, a name with other characters than letters, digits, `_`, `.`, `-`, or no
            such advantage.
    """

    name: str
    parts: tuple[Part, ...]
    about: str = ""
    """Formula, source and known failures."""
    advantage: str = "grpo"
    """How the scores of a group are compared: a name of `rewards.advantage.ADVANTAGES`."""

    def __post_init__(self) -> None:
        names = [p.name for p in self.parts]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"reward {self.name!r}: wanted one or more terms with different names; came {names}")
        for name in (self.name, *names):
            if not _NAME.fullmatch(name):
                raise ValueError(f"reward {self.name!r}: name {name!r} has other characters than letters, digits, _ . -")
        if self.advantage not in ADVANTAGES:
            raise ValueError(f"reward {self.name!r}: unknown advantage {instead(self.advantage, ADVANTAGES)}")

    @property
    def __name__(self) -> str:
        """The name again: trainers label the columns of their logs with it."""
        return self.name

    def __call__(self, verdict: Verdict, history: History = ()) -> Score:
        """The terms of one verdict."""
        infra = verdict.status is Status.INFRA
        return Score(tuple(Term(p.name, None if infra else p.scorer.score(verdict, history), p.weight) for p in self.parts))

    def advantages(self, scores: Sequence[Score]) -> list[float]:
        """The advantage of every sample of one group."""
        return ADVANTAGES[self.advantage]([None if score.unscored else score.total for score in scores])

    def to_toml(self) -> str:
        """A file's text; `from_toml` gives an equal reward back."""
        lines = [f"{key} = {_quote(getattr(self, key))}" for key in ("name", "about", "advantage")]
        for part in self.parts:
            settings: dict[str, Any] = {"kind": part.scorer.kind, "name": part.name, "weight": part.weight}
            settings |= {f.name: getattr(part.scorer, f.name) for f in fields(part.scorer)}  # type: ignore[arg-type]
            lines += ["", "[[terms]]", *(f"{key} = {_quote(value)}" for key, value in settings.items())]
        return "\n".join(lines) + "\n"


def from_toml(path: str | Path) -> Composed:
    """Read a reward from a file (its form: the head of this module).

    Raises:
        ValueError: what is wrong, and where in the file.
        FileNotFoundError: no such file.
    """
    try:
        raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        _refuse_unknown("key", raw, ("name", "about", "advantage", "terms"))
        tables = _fit("terms", raw.get("terms", []), list)
        parts = tuple(_part(f"terms[{i}]", _fit(f"terms[{i}]", table, dict)) for i, table in enumerate(tables))
        name, about, advantage = (_fit(key, raw.get(key, plain), str) for key, plain in _TEXTS)
        return Composed(name, parts, about, advantage)
    except ValueError as error:
        raise ValueError(f"reward file {path}: {error}") from error


def _part(where: str, table: dict[str, Any]) -> Part:
    kind = _fit(f"{where}.kind", table.get("kind"), str)
    if kind not in KINDS:
        raise ValueError(f"{where}: unknown kind {instead(kind, KINDS)}")
    hints = get_type_hints(KINDS[kind])
    wanted = {f.name: hints[f.name] for f in fields(KINDS[kind])}  # type: ignore[arg-type]
    settings = {key: value for key, value in table.items() if key not in ("kind", "name", "weight")}
    _refuse_unknown(f"parameter of {where} ({kind})", settings, wanted)
    settings = {key: _fit(f"{where}.{key}", value, wanted[key]) for key, value in settings.items()}
    weight, name = _fit(f"{where}.weight", table.get("weight", 1.0), float), _fit(f"{where}.name", table.get("name", ""), str)
    try:
        return Part(KINDS[kind](**settings), weight, name)
    except ValueError as error:
        raise ValueError(f"{where} ({kind}): {error}") from error


def _fit(where: str, value: Any, wanted: type) -> Any:
    """The value as the wanted type; a whole number will do for a float."""
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        came = "nothing" if value is None else f"{value!r} ({type(value).__name__})"
        raise ValueError(f"{where}: wanted {wanted.__name__}, came {came}")
    return value


def _refuse_unknown(what: str, came: Collection[str], known: Collection[str]) -> None:
    for name in came:
        if name not in known:
            raise ValueError(f"unknown {what} {instead(name, known)}")


def instead(name: str, known: Collection[str]) -> str:
    """A name that came, the known one that is closest, and all known ones."""
    close = get_close_matches(name, known, n=1)
    return f"{name!r};{f' did you mean {close[0]!r}?' if close else ''} there are: {', '.join(known) or 'none'}"


def _quote(value: str | float) -> str:
    """A TOML value: its strings are JSON's, save for the control character JSON lets through; so are its numbers but one."""
    if value == math.inf:
        return "inf"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
