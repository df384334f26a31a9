"""Where verdicts and rollouts are kept: one SQLite file in WAL mode, shared by threads and processes.

A verdict is stored once per key, with the source and the secret seed, so that it can be replayed.  Texts are kept as
UTF-8 bytes, because a policy may write what no TEXT column holds (lone surrogates).

Not here: rewards (recomputed from verdicts), the key's parts (`Key.of` takes them from the verdict).
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from pkb_env.errors import UsageError
from rewards.verdict import Status, Verdict

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
    """Hash of the evaluator's configuration."""

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


_KEY = tuple(f.name for f in fields(Key))
_ROLLOUT = tuple(f.name for f in fields(Rollout))
_TEXTS = ("prompt", "completion")
_NUMBERS = frozenset({"problem_version", "world_size", "step", "group", "turn", "verdict", "sample"})


def _columns(names: tuple[str, ...]) -> str:
    return ", ".join(f'"{name}" {_type(name)}' for name in names)


def _type(name: str) -> str:
    return ("INTEGER" if name in _NUMBERS else "TEXT") + ("" if name == "verdict" else " NOT NULL")


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(f'"{name}"' for name in names)


_TABLES = (
    f"""CREATE TABLE verdicts (
        id INTEGER PRIMARY KEY, {_columns(_KEY)}, status TEXT NOT NULL, json TEXT NOT NULL, source BLOB NOT NULL,
        secret BLOB NOT NULL, created REAL NOT NULL, UNIQUE ({_quoted(_KEY)}))""",
    f"CREATE TABLE rollouts (id INTEGER PRIMARY KEY, {_columns(_ROLLOUT)}, created REAL NOT NULL)",
    "CREATE INDEX rollouts_by_run ON rollouts (run, step)",
)


class Store:
    """An open store.  Safe to share between threads; each process opens its own, also after a fork.

    Raises:
        UsageError: the file is no store, or one of another schema.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._inherited: list[sqlite3.Connection] = []
        self._pid = os.getpid()
        with self._open():
            pass

    def __reduce__(self) -> tuple[object, ...]:
        return Store, (self.path,)

    def put(self, key: Key, verdict: Verdict, source: str, secret: bytes) -> int:
        """Store a verdict unless its key is there already; the row's id either way.

        Raises:
            UsageError: the verdict is INFRA, which is never a result, or does not belong to the key.
        """
        if verdict.status is Status.INFRA:
            raise UsageError(f"verdict of {verdict.problem} is INFRA, which is never stored as a result; evaluate again")
        if Key.of(verdict, key.harness, key.config) != key:
            raise UsageError(f"verdict of {verdict.problem} ({verdict.digest[:12]}) does not belong to key {key}")
        row = (*astuple(key), verdict.status.value, verdict.to_json(), _bytes(source), secret, time.time())
        marks = ", ".join("?" * len(row))
        with self._open() as db:
            db.execute(
                f"INSERT OR IGNORE INTO verdicts ({_quoted(_KEY)}, status, json, source, secret, created) VALUES ({marks})", row
            )
            return int(db.execute(f"SELECT id FROM verdicts WHERE {_where(_KEY)}", astuple(key)).fetchone()[0])

    def find(self, key: Key) -> Verdict | None:
        """The verdict stored under a key."""
        found = self.search(**{name: getattr(key, name) for name in _KEY})
        return found[0].verdict if found else None

    def get(self, row: int) -> Stored:
        """A verdict by id, with its source and secret.

        Raises:
            UsageError: no such id.
        """
        found = self.search(id=row)
        if not found:
            raise UsageError(f"{self.path} has no verdict {row}")
        return found[0]

    def search(self, limit: int = -1, **wanted: str | int) -> list[Stored]:
        """Verdicts whose columns have the wanted values, newest first; columns are those of `Key`, `id` and `status`.

        Raises:
            UsageError: no such column.
        """
        unknown = set(wanted) - {*_KEY, "id", "status"}
        if unknown:
            raise UsageError(f"verdicts have no column {', '.join(sorted(unknown))}; there are id, status, {', '.join(_KEY)}")
        where = _where(tuple(wanted)) or "1"
        query = f"SELECT id, json, source, secret, created, {_quoted(_KEY)} FROM verdicts WHERE {where} ORDER BY id DESC LIMIT ?"
        with self._open() as db:
            rows = db.execute(query, (*wanted.values(), limit)).fetchall()
        return [_stored(row) for row in rows]

    def add_rollout(self, rollout: Rollout) -> int:
        """Store one completion; its row's id."""
        row = [_bytes(v) if name in _TEXTS else v for name, v in zip(_ROLLOUT, astuple(rollout), strict=True)]
        marks = ", ".join("?" * (len(row) + 1))
        with self._open() as db:
            done = db.execute(f"INSERT INTO rollouts ({_quoted(_ROLLOUT)}, created) VALUES ({marks})", (*row, time.time()))
        return int(done.lastrowid or 0)

    def rollouts(self, run: str) -> list[Rollout]:
        """The completions of a run in the order in which they were stored."""
        with self._open() as db:
            rows = db.execute(f"SELECT {_quoted(_ROLLOUT)} FROM rollouts WHERE run = ? ORDER BY id", (run,)).fetchall()
        return [_rollout(row) for row in rows]

    def close(self) -> None:
        """Close the file; the next call opens it again."""
        with self._lock:
            if self._connection is not None and self._pid == os.getpid():
                self._connection.close()
            self._connection = None

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._pid != os.getpid() and self._connection is not None:
                # SQLite forbids even closing a connection that came through a fork: it stays, unused.
                self._inherited.append(self._connection)
                self._connection = None
            self._pid = os.getpid()
            self._connection = self._connection or _connect(self.path)
            yield self._connection


def _connect(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
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


def _where(names: tuple[str, ...]) -> str:
    return " AND ".join(f'"{name}" = ?' for name in names)


def _stored(row: tuple[Any, ...]) -> Stored:
    number, json, source, secret, created, *key = row
    return Stored(number, Key(*key), Verdict.from_json(json), _text(source), secret, created)


def _rollout(row: tuple[Any, ...]) -> Rollout:
    plain: list[Any] = [_text(value) if isinstance(value, bytes) else value for value in row]
    return Rollout(*plain)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")
