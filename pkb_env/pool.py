"""Oracle groups kept between evaluations: nothing untrusted ever ran in them, so they may serve again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pkb_env.boxes import Task
from pkb_env.cancellation import Cancellation
from pkb_env.config import EvalConfig
from pkb_env.oracles import Oracle
from pkb_env.sandbox.launcher import Zygote


class OraclePool:
    """At most `keep` idle groups; the one idle for longest goes first."""

    def __init__(self, zygote: Zygote, folder: Path, config: EvalConfig, keep: int = 4) -> None:
        self._zygote, self._folder, self._config, self._keep = zygote, folder, config, keep
        self._lock, self._idle, self._closed = threading.Lock(), list[Oracle](), False

    @contextmanager
    def taken(self, task: Task, cancellation: Cancellation) -> Iterator[Oracle]:
        """A group for this task alone, as fresh as a candidate; it goes back unless it broke or the block raises."""
        oracle = self._take(task)
        try:
            if oracle.worn:
                oracle.renew()
            with cancellation.watching(*oracle.channels()):
                yield oracle
        except BaseException:
            oracle.close()
            raise
        if oracle.broken:
            oracle.close()
        else:
            self._give_back(oracle)

    def forget(self, task: Task) -> None:
        """End the idle groups of a task: what broke one evaluation may have broken them too, unseen."""
        with self._lock:
            gone = [oracle for oracle in self._idle if oracle.task == task]
            self._idle = [oracle for oracle in self._idle if oracle.task != task]
        for oracle in gone:
            oracle.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for oracle in idle:
            oracle.close()

    def _take(self, task: Task) -> Oracle:
        """An idle group that is still there, else a new one."""
        while (oracle := self._idle_one(task)) is not None:
            if not oracle.lost:
                return oracle
            oracle.close()
        return Oracle(self._zygote, task, self._folder, self._config)

    def _idle_one(self, task: Task) -> Oracle | None:
        with self._lock:
            oracle = next((each for each in self._idle if each.task == task), None)
            if oracle is not None:
                self._idle.remove(oracle)
            return oracle

    def _give_back(self, oracle: Oracle) -> None:
        with self._lock:
            self._idle.append(oracle)
            surplus = self._idle if self._closed else self._idle[: -self._keep]
            self._idle = [] if self._closed else self._idle[-self._keep :]
        for old in surplus:
            old.close()
