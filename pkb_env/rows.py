"""What the store keeps, and the file it keeps it in: rows, tables, the schema's version.

Not here: reading and writing rows (`store`).
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, fields
from pathlib import Path

from pkb_env.errors import UsageError
from rewards.verdict import Verdict

SCHEMA = 1
"""Kept in the file's `user_version`; a change of the tables raises it."""
BUSY_S = 60.0
"""How long a writer waits for another process before it gives up."""


@dataclass(frozen=True)
class Key:
    """What makes two evaluations the same."""

    digest: str
    problem: str
    problem_version: int
    profile: str
    size: str
    world_size: int
    backend: str
    topology: str
    dtype: str
    hardware: str
    toolchain: str
    harness: str
    """Version of pkb-env."""
    config: str
    """The settings of the evaluator that decide a verdict, as JSON."""

    @classmethod
    def of(cls, verdict: Verdict, harness: str, config: str) -> Key:
        """The key under which a verdict of this harness and configuration is stored."""
        named = {f.name: getattr(verdict, f.name) for f in fields(cls) if f.name not in ("harness", "config")}
        return cls(**named, harness=harness, config=config)


@dataclass(frozen=True)
class Stored:
    """One row of verdicts."""

    id: int
    key: Key
    verdict: Verdict
    source: str
    secret: bytes
    """The seed of the trials; never shown to a policy."""
    created: float
    """Seconds since 1970."""


@dataclass(frozen=True)
class Rollout:
    """One completion of a policy.  Samples of one group answer the same prompt."""

    run: str
    step: int
    group: int
    turn: int
    prompt: str
    completion: str
    verdict: int | None = None
    """Row of the verdict; None when unscored."""
    sample: int = 0
    """Position inside the group."""


KEY_COLUMNS = tuple(f.name for f in fields(Key))
ROLLOUT_COLUMNS = tuple(f.name for f in fields(Rollout))
PLACE = ("run", "step", "group", "sample", "turn")
"""What no two rollouts have in common."""
ENCODED = ("prompt", "completion")
_NUMBERS = frozenset({"problem_version", "world_size", "step", "group", "turn", "verdict", "sample"})


def _columns(names: tuple[str, ...]) -> str:
    return ", ".join(f'"{name}" {_type(name)}' for name in names)


def _type(name: str) -> str:
    return ("INTEGER" if name in _NUMBERS else "TEXT") + ("" if name == "verdict" else " NOT NULL")


def quoted(names: tuple[str, ...]) -> str:
    """The names as SQL; `group` is a keyword."""
    return ", ".join(f'"{name}"' for name in names)


_TABLES = (
    f"""CREATE TABLE verdicts (
        id INTEGER PRIMARY KEY, {_columns(KEY_COLUMNS)}, status TEXT NOT NULL, json TEXT NOT NULL, source BLOB NOT NULL,
        secret BLOB NOT NULL, created REAL NOT NULL, UNIQUE ({quoted(KEY_COLUMNS)}))""",
    f"CREATE TABLE rollouts (id INTEGER PRIMARY KEY, {_columns(ROLLOUT_COLUMNS)}, created REAL NOT NULL)",
    "CREATE INDEX rollouts_by_run ON rollouts (run, step)",
)


def connect(path: Path) -> sqlite3.Connection:
    """Open a store, and make it if there is none.

    Raises:
        UsageError: the file is no store, or one of another schema.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    except (sqlite3.Error, OSError) as error:
        raise UsageError(f"{path} cannot be opened as a store: {error}; name another file") from error
    try:
        _prepare(db, path)
    except sqlite3.DatabaseError as error:
        db.close()
        raise UsageError(f"{path} cannot be used as a store: {error}; name another file") from error
    except UsageError:
        db.close()
        raise
    return db


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    """Check the schema, or make the tables; one process makes them, the others wait."""
    if _version(db) == 0:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("BEGIN IMMEDIATE")
        if _version(db) == 0:
            if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                db.execute("ROLLBACK")
                raise UsageError(f"{path} is another program's database; name another file")
            for statement in _TABLES:
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {SCHEMA}")
        db.execute("COMMIT")
    if _version(db) != SCHEMA:
        raise UsageError(f"{path} has store schema {_version(db)}, this version reads {SCHEMA}; name another file")
    db.execute("PRAGMA synchronous = NORMAL")


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])
