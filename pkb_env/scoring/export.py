"""Stored rollouts as rows for training: one JSON object a line, Parquet, or a folder that `datasets` loads.

One row per turn, scored anew; `completion` is what the policy wrote, `prompt` what it answered.

Not here: scoring (`rescore`), reading the store (`episodes`).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pkb_env.errors import UsageError
from pkb_env.rows import Rollout
from pkb_env.scoring.episodes import Episode
from pkb_env.scoring.rescore import Rescored
from rewards.speed import proven_speedup
from rewards.verdict import Verdict

Row = dict[str, Any]
ONLY: Mapping[str, Callable[[Row], bool]] = {
    "all": bool,
    "scored": lambda row: row["value"] is not None,
    "correct": lambda row: row["status"] == "CORRECT",
    "faster": lambda row: bool(row["faster"]),
}
"""Which rows are wanted; the correct ones are what SFT is fed."""


def rows(found: Sequence[Episode], scored: Rescored) -> list[Row]:
    """One row per turn, in order: where it stands, texts, what was found, what it is worth."""
    turns = [pair for episode in found for pair in zip(episode.turns, episode.verdicts, strict=True)]
    worth = zip(scored.values, scored.advantages, strict=True)
    return [
        _row(rollout, verdict) | {"reward": scored.reward, "value": value, "advantage": advantage}
        for (rollout, verdict), (value, advantage) in zip(turns, worth, strict=True)
    ]


def keep(found: Sequence[Row], only: str) -> list[Row]:
    """The rows that one of `ONLY` names.

    Raises:
        UsageError: another word.
    """
    if only not in ONLY:
        raise UsageError(f"{only!r} keeps nothing known; wanted one of {', '.join(ONLY)}")
    return [row for row in found if ONLY[only](row)]


def write(path: Path, found: Sequence[Row]) -> None:
    """Write rows as the name asks: `.jsonl`, `.parquet`, or a folder for `datasets.load_from_disk`.

    Lone surrogates, which no such file holds, become question marks.

    Raises:
        UsageError: no rows, another ending, or what the format needs is not installed.
    """
    if not found:
        raise UsageError("there is no row to write; ask for less with --only")
    clean = [{key: _encodable(value) for key, value in row.items()} for row in found]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in clean), encoding="utf-8")
    elif path.suffix == ".parquet":
        _library("pandas").DataFrame(clean).to_parquet(path)
    elif not path.suffix:
        _library("datasets").Dataset.from_list(clean).save_to_disk(path)
    else:
        raise UsageError(f"{path} ends in {path.suffix!r}; wanted .jsonl, .parquet, or no ending for a folder")


def _row(rollout: Rollout, verdict: Verdict | None) -> Row:
    place = {"run": rollout.run, "step": rollout.step, "group": rollout.group, "sample": rollout.sample, "turn": rollout.turn}
    texts = {"prompt": rollout.prompt, "completion": rollout.completion}
    return place | texts | (_found(verdict) if verdict else dict.fromkeys(_COLUMNS))


_COLUMNS = ("problem", "backend", "world_size", "size", "status", "message", "speedup", "proven_speedup", "faster")


def _found(verdict: Verdict) -> Row:
    row: Row = {name: getattr(verdict, name) for name in _COLUMNS if name not in ("status", "proven_speedup")}
    return row | {"status": verdict.status.value, "proven_speedup": proven_speedup(verdict)}


def _encodable(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UsageError(f"this format needs {name}; pip install 'pkb-env[train]', or name a .jsonl file") from None
