"""Where verdicts and rollouts are kept: one SQLite file in WAL mode, shared by threads and processes.

A verdict is stored once per key, with the source and the secret seed, so that it can be replayed.  Texts are kept as
UTF-8 bytes, because a policy may write what no TEXT column holds (lone surrogates).

Not here: rewards (recomputed from verdicts), the rows and tables themselves (`rows`).
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

from pkb_env.errors import UsageError
from pkb_env.rows import ENCODED, KEY_COLUMNS, PLACE, ROLLOUT_COLUMNS, Key, Rollout, Stored, connect, quoted
from rewards.verdict import Status, Verdict

__all__ = ["Key", "Rollout", "Store", "Stored"]
_KEY, _ROLLOUT = quoted(KEY_COLUMNS), quoted(ROLLOUT_COLUMNS)


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
                f"INSERT OR IGNORE INTO verdicts ({_KEY}, status, json, source, secret, created) VALUES ({marks})", row
            )
            return int(db.execute(f"SELECT id FROM verdicts WHERE {_where(KEY_COLUMNS)}", astuple(key)).fetchone()[0])

    def row_of(self, verdict: Verdict, source: str) -> int | None:
        """The row of a verdict, which is stored now, without a secret, if it is not there; None for INFRA."""
        if verdict.status is Status.INFRA:
            return None
        there = self.search(digest=verdict.digest, problem=verdict.problem, status=verdict.status.value)
        found = next((row.id for row in there if row.verdict == verdict), None)
        return self.put(Key.of(verdict, "", ""), verdict, source, b"") if found is None else found

    def find(self, key: Key) -> Verdict | None:
        """The verdict stored under a key."""
        found = self.search(**{name: getattr(key, name) for name in KEY_COLUMNS})
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
        unknown = set(wanted) - {*KEY_COLUMNS, "id", "status"}
        if unknown:
            there = ", ".join(("id", "status", *KEY_COLUMNS))
            raise UsageError(f"verdicts have no column {', '.join(sorted(unknown))}; there are {there}")
        where = _where(tuple(wanted)) or "1"
        query = f"SELECT id, json, source, secret, created, {_KEY} FROM verdicts WHERE {where} ORDER BY id DESC LIMIT ?"
        with self._open() as db:
            rows = db.execute(query, (*wanted.values(), limit)).fetchall()
        return [_stored(row) for row in rows]

    def add_rollouts(self, rollouts: Iterable[Rollout]) -> None:
        """Store completions, all or none of them; each takes the place of the one with its run, step, group, sample and turn."""
        with self._open() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                for rollout in rollouts:
                    _insert(db, rollout)
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")

    def rollouts(self, run: str) -> list[Rollout]:
        """The completions of a run in the order in which they were stored."""
        with self._open() as db:
            rows = db.execute(f"SELECT {_ROLLOUT} FROM rollouts WHERE run = ? ORDER BY id", (run,)).fetchall()
        return [_rollout(row) for row in rows]

    def graded(self, run: str | None = None) -> list[tuple[Rollout, Verdict | None]]:
        """The completions of a run, or of all, in the order in which they were stored, each with its verdict."""
        columns = ", ".join(f'r."{name}"' for name in ROLLOUT_COLUMNS)
        query = f"SELECT v.json, {columns} FROM rollouts r LEFT JOIN verdicts v ON v.id = r.verdict"
        with self._open() as db:
            rows = db.execute(f"{query} WHERE r.run = ? OR ? IS NULL ORDER BY r.id", (run, run)).fetchall()
        return [(_rollout(rest), None if json is None else Verdict.from_json(json)) for json, *rest in rows]

    def runs(self) -> list[str]:
        """Names of the runs that have rollouts, oldest first."""
        with self._open() as db:
            rows = db.execute("SELECT run FROM rollouts GROUP BY run ORDER BY min(id)").fetchall()
        return [str(row[0]) for row in rows]

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
            self._connection = self._connection or connect(self.path)
            yield self._connection


def _insert(db: sqlite3.Connection, rollout: Rollout) -> None:
    db.execute(f"DELETE FROM rollouts WHERE {_where(PLACE)}", [getattr(rollout, name) for name in PLACE])
    row = [_bytes(v) if name in ENCODED else v for name, v in zip(ROLLOUT_COLUMNS, astuple(rollout), strict=True)]
    marks = ", ".join("?" * (len(row) + 1))
    db.execute(f"INSERT INTO rollouts ({_ROLLOUT}, created) VALUES ({marks})", (*row, time.time()))


def _where(names: tuple[str, ...]) -> str:
    return " AND ".join(f'"{name}" = ?' for name in names)


def _stored(row: tuple[Any, ...]) -> Stored:
    number, json, source, secret, created, *key = row
    return Stored(number, Key(*key), Verdict.from_json(json), _text(source), secret, created)


def _rollout(row: Sequence[Any]) -> Rollout:
    plain: list[Any] = [_text(value) if isinstance(value, bytes) else value for value in row]
    return Rollout(*plain)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")
