"""An oracle as the evaluator sees it: inputs, answers and the judge for one task, and the reference in a box of its own.

Not here: what runs on the other side (`oracle`).
"""

from __future__ import annotations

import os
import select
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import problems
from pkb_env import outcome
from pkb_env.box.channel import Channel, ChannelClosed, ChannelViolation
from pkb_env.boxes import SLOTS, Body, Box, BoxFailed, Slots, Task
from pkb_env.call import Call
from pkb_env.cancellation import SLACK_S, hang_up
from pkb_env.config import EvalConfig
from pkb_env.errors import HarnessError
from pkb_env.sandbox.launcher import Zygote

_START_S, _DEADLINE_S = 150.0, 60.0
_FRESH_CALLS = 2 * SLOTS
_T = TypeVar("_T")


class Oracle:
    """Inputs, answers and the judge for one task, and the reference in a box of its own, called just as a candidate is."""

    def __init__(self, zygote: Zygote, task: Task, folder: Path, config: EvalConfig) -> None:
        self.task = task
        self._folder = Path(tempfile.mkdtemp(prefix="oracle-", dir=folder))
        self._fds: tuple[int, ...] = ()
        self._slots: Slots | None = None
        self.broken = False
        """Whether its reference failed once: nobody else shall get it."""
        self.guessable = False
        """Whether inputs are the same whatever the secret is; known once it is ready."""
        self.call_bytes = self.cache_bytes = 0
        """Arguments and outputs of one call, all ranks; the last cache before their memory, 0 where each call finds it swept.

        Known once it is ready.
        """
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self.channel = zygote.spawn("oracle")
            undo.callback(hang_up, self.channel)
            path = {"path": [p or os.getcwd() for p in sys.path], "store": str(self._folder / "store"), "slots": SLOTS}
            self._send({**path, **vars(task), "devices": task.devices})
            self._new_reference = partial(Box, zygote, config, self._folder)
            self._reference, self._up, self._calls = self._new_reference(), False, 0
            self._leaving: Thread | None = None
            undo.pop_all()

    def ready(self) -> Slots:
        """The arenas for a candidate's box; waits until there are some, and lets the reference come up.

        Raises:
            HarnessError: the group does not come up.
        """
        if self._slots is None:
            body, self._fds = self._receive(_START_S)
            sizes, half = (body["in"], body["out"]), len(self._fds) // 2
            self._slots = Slots(self._fds[half:], *sizes)
            self.call_bytes, self.cache_bytes, self.guessable = int(body["bytes"]), int(body["cache"]), bool(body["guessable"])
            self._load_reference(Slots(self._fds[:half], *sizes))
        return self._slots

    @property
    def worn(self) -> bool:
        """Whether the reference has been called more often than a candidate that is about to be timed."""
        return self._calls > _FRESH_CALLS

    @property
    def lost(self) -> bool:
        """Whether a process of it has ended meanwhile."""
        poller = select.poll()
        for channel in self.channels():
            poller.register(channel.fileno(), 0)  # what is always told: the other end is gone
        return bool(poller.poll(0))

    def renew(self) -> None:
        """Let the reference come up in a fresh group, like a candidate's: an old one is some percent faster.

        Raises:
            HarnessError: it cannot be started.
        """
        slots, old = self.ready(), self._reference
        self._let_go()
        self._reference, self._up, self._calls = self._new_reference(), False, 0
        self._leaving = Thread(target=old.close, daemon=True)
        self._leaving.start()
        self._load_reference(replace(slots, fds=self._fds[: len(self._fds) // 2]))

    def _load_reference(self, slots: Slots) -> None:
        self._reference.load(_reference_source(self.task), self.task, slots)

    def _let_go(self) -> None:
        """Wait until the group before has ended."""
        if self._leaving is not None:
            self._leaving.join()

    def ask(self, command: str, **details: Any) -> Body:
        """Give an order (`begin`, `fill`, `prepare`, `judge`, `summary`) and wait for its answer.

        Raises:
            HarnessError: the oracle broke or is gone.
        """
        self.ready()
        self._send({"cmd": command, "deadline_s": _DEADLINE_S, **details})
        return self._receive(_DEADLINE_S + SLACK_S)[0]

    def call(self, slot: int, nonce: int) -> Call:
        """One call of the reference on every rank.

        Raises:
            HarnessError: the reference failed.
        """
        if not self._up:
            self._trusted(self._reference.await_ready)
            self._up = True
        self._calls += 1
        return self._trusted(lambda: self._reference.call(slot, nonce))

    def channels(self) -> tuple[Channel, Channel]:
        return self.channel, self._reference.channel

    def _send(self, body: Body) -> None:
        try:
            self.channel.send(body)
        except ChannelClosed as error:
            raise HarnessError(f"the oracle of {self.task.problem} is gone: {error}") from None

    def _trusted(self, act: Callable[[], _T]) -> _T:
        try:
            return act()
        except BoxFailed as failure:
            self.broken = True
            why = outcome.explain(failure.report, failure.deadline_s).message
            raise HarnessError(f"the reference of {self.task.problem} failed: {why}") from None

    def _receive(self, timeout: float) -> tuple[Body, tuple[int, ...]]:
        try:
            message = self.channel.recv(timeout)
        except (ChannelClosed, ChannelViolation, TimeoutError) as error:
            raise HarnessError(f"the oracle of {self.task.problem} is gone: {error}") from None
        if message.body.get("event") == "broken":
            broken = message.body["error"]
            raise HarnessError(f"the oracle of {self.task.problem} broke: {broken}{self._remedy(broken)}")
        return message.body, message.fds

    def _remedy(self, error: str) -> str:
        where = f"size {self.task.size!r} with {self.task.world_size} ranks ({self.task.topology})"
        return f"; {where} is too large for this machine, use a smaller one" if outcome.MEMORY.search(error) else ""

    def close(self) -> None:
        self._let_go()
        self._reference.close()
        hang_up(self.channel)
        for fd in self._fds:
            os.close(fd)
        self._fds = ()
        shutil.rmtree(self._folder, ignore_errors=True)


def _reference_source(task: Task) -> str:
    return problems.reference_source(problems.load(task.problem), on_gpu=bool(task.devices))
