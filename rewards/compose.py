"""From terms to a reward: the presets, and rewards read from a TOML file.

    name = "mine"
    [[terms]]
    kind = "status_floor"
    [[terms]]
    kind = "log_speed"
    weight = 0.5
    high = 3.0

A new kind of term is one class and one entry in `KINDS`; a new preset is one entry in `PRESETS`.

Not here: what a term computes (`correctness`, `speed`).
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

from rewards.correctness import Correct, StatusFloor
from rewards.score import History, Reward, Score, Scorer, Term
from rewards.speed import LogSpeed, Speedup
from rewards.verdict import Status, Verdict

KINDS: Mapping[str, type[Scorer]] = {k.kind: k for k in (StatusFloor, Correct, LogSpeed, Speedup)}
"""Kinds of terms a TOML file can name."""

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
        ValueError: no part, two parts of one name, or a name with other characters than letters, digits, `_`, `.`, `-`.
    """

    name: str
    parts: tuple[Part, ...]
    about: str = ""
    """Formula, source and known failures."""

    def __post_init__(self) -> None:
        names = [p.name for p in self.parts]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"reward {self.name!r}: wanted one or more terms with different names; came {names}")
        for name in (self.name, *names):
            if not _NAME.fullmatch(name):
                raise ValueError(f"reward {self.name!r}: name {name!r} has other characters than letters, digits, _ . -")

    @property
    def __name__(self) -> str:
        """The name again: trainers label the columns of their logs with it."""
        return self.name

    def __call__(self, verdict: Verdict, history: History = ()) -> Score:
        """The terms of one verdict."""
        infra = verdict.status is Status.INFRA
        return Score(tuple(Term(p.name, None if infra else p.scorer.score(verdict, history), p.weight) for p in self.parts))

    def to_toml(self) -> str:
        """A file's text; `from_toml` gives an equal reward back."""
        lines = [f"name = {_quote(self.name)}", f"about = {_quote(self.about)}"]
        for part in self.parts:
            settings: dict[str, Any] = {"kind": part.scorer.kind, "name": part.name, "weight": part.weight}
            settings |= {f.name: getattr(part.scorer, f.name) for f in fields(part.scorer)}  # type: ignore[arg-type]
            lines += ["", "[[terms]]", *(f"{key} = {_quote(value)}" for key, value in settings.items())]
        return "\n".join(lines) + "\n"


PRESETS: Mapping[str, Reward] = {
    "default": Composed(
        name="default",
        parts=(Part(StatusFloor()), Part(LogSpeed())),
        about="status floor + clip(log2(proven speed-up), -1, 2), between -2 and 3.  Proven: the lower end of the interval, "
        "nothing above 1 unless the pairs prove it, nothing beyond the roofline.  A correct answer earns 0 to 3 (1 at parity), "
        "a wrong one -0.8 to -0.7, a broken one -1 to -0.85, cheating -2.  A correct answer without usable times earns 1.",
    ),
    "kevin": Composed(
        name="kevin",
        parts=(Part(Correct(), weight=0.3), Part(Speedup())),
        about="0.3 c + s c, c = 1 if correct else 0, s = reference time / candidate time (arXiv 2507.11948).  Known failure: "
        "s has no upper bound and is a point estimate, so one mismeasured or cheating outlier dominates its batch.  Differs "
        "from the paper in what c means: ours are the judge's verdicts; sources are screened, not zeroed for using torch.",
    ),
}


def get(name_or_path: str | Path) -> Reward:
    """A preset by name, or a reward from a TOML file (anything that ends in `.toml`).

    Raises:
        ValueError: no such preset, with the closest one; or a bad file.
        FileNotFoundError: no such file.
    """
    if str(name_or_path).endswith(".toml"):
        return from_toml(name_or_path)
    try:
        return PRESETS[str(name_or_path)]
    except KeyError:
        raise ValueError(f"unknown reward {_instead(str(name_or_path), PRESETS)}; or name a .toml file") from None


def from_toml(path: str | Path) -> Composed:
    """Read a reward from a file (its form: the head of this module).

    Raises:
        ValueError: what is wrong, and where in the file.
        FileNotFoundError: no such file.
    """
    try:
        raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        _refuse_unknown("key", raw, ("name", "about", "terms"))
        tables = _fit("terms", raw.get("terms", []), list)
        parts = tuple(_part(f"terms[{i}]", _fit(f"terms[{i}]", table, dict)) for i, table in enumerate(tables))
        return Composed(_fit("name", raw.get("name"), str), parts, _fit("about", raw.get("about", ""), str))
    except ValueError as error:
        raise ValueError(f"reward file {path}: {error}") from error


def _part(where: str, table: dict[str, Any]) -> Part:
    kind = _fit(f"{where}.kind", table.get("kind"), str)
    if kind not in KINDS:
        raise ValueError(f"{where}: unknown kind {_instead(kind, KINDS)}")
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
            raise ValueError(f"unknown {what} {_instead(name, known)}")


def _instead(name: str, known: Collection[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f"{name!r};{f' did you mean {close[0]!r}?' if close else ''} there are: {', '.join(known) or 'none'}"


def _quote(value: str | float) -> str:
    """A TOML value: its strings are JSON's, save for the control character JSON lets through."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
