"""A box and an oracle as the evaluator sees them: typed calls over their channels.

Not here: the order of an evaluation (`evaluator`), what runs on the other side (`sandbox.box_group`, `oracle`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import problems
from pkb_env import hardware

from pkb_env.box.channel import Channel, ChannelClosed, ChannelViolation
from pkb_env.config import EvalConfig
from pkb_env.errors import HarnessError
from pkb_env.sandbox.launcher import Zygote

SLOTS = 4
_SLACK_S = 30.0
"""How much longer than its own deadline a supervisor may take to answer before it counts as dead."""
_START_S, _ORACLE_DEADLINE_S = 150.0, 60.0
_MEMORY_SHARE = 0.7
"""How much of the machine's memory the ranks of one box may take together."""
Body = dict[str, Any]
_T = TypeVar("_T")


def _say_goodbye(channel: Channel) -> None:
    """Nothing more will be said: the supervisor ends its group, reaps it and closes its own end."""
    with contextlib.suppress(OSError):
        channel.sock.shutdown(socket.SHUT_WR)


def _hang_up(channel: Channel) -> None:
    """Say goodbye and wait until the supervisor has ended."""
    _say_goodbye(channel)
    with contextlib.suppress(ChannelClosed, ChannelViolation, TimeoutError):
        while True:
            channel.recv(_SLACK_S)
    channel.close()


class Cancelled(BaseException):
    """The evaluation was given up; whoever cancelled it does not wait for a verdict."""


class Cancellation:
    """Lets another thread give up an evaluation: closes what it talks through."""

    def __init__(self) -> None:
        self._lock, self._channels, self._set = threading.Lock(), list[Channel](), False

    def cancel(self) -> None:
        with self._lock:
            self._set = True
            for channel in self._channels:
                _say_goodbye(channel)

    def check(self) -> None:
        if self._set:
            raise Cancelled

    @contextmanager
    def watching(self, *channels: Channel) -> Iterator[None]:
        """While the block runs, cancelling closes these channels; what breaks through that is raised as Cancelled."""
        with self._lock:
            self._channels += channels
        try:
            self.check()
            yield
        except (HarnessError, ChannelClosed):
            self.check()
            raise
        finally:
            with self._lock:
                for channel in channels:
                    self._channels.remove(channel)


@dataclass(frozen=True)
class Task:
    """What an oracle group is made for."""

    problem: str
    version: int
    world_size: int
    size: str
    profile: str
    dtype: str


@dataclass(frozen=True)
class Call:
    """Outside clock of one call."""

    ns: int
    ranks_ns: tuple[int, ...]

    @property
    def skew_ns(self) -> int:
        return max(self.ranks_ns) - min(self.ranks_ns)


@dataclass(frozen=True)
class Slots:
    """Descriptors and sizes of the arenas through which one group of ranks gets its arguments and gives its outputs."""

    fds: tuple[int, ...]
    """Inputs of every rank, then outputs of every rank."""
    in_capacity: int
    out_capacity: int


class BoxFailed(Exception):  # noqa: N818  a result of the candidate's, not an error of ours
    """The group failed; carries the supervisor's report."""

    def __init__(self, report: Body, deadline_s: float) -> None:
        super().__init__(report.get("trouble"))
        self.report, self.deadline_s = report, deadline_s


class Box:
    """Ranks inside their walls, running one source: a candidate's, or the reference's."""

    def __init__(
        self, zygote: Zygote, config: EvalConfig, parent: Path, build: Callable[[Body, Path], Body] | None = None
    ) -> None:
        self._config, self._build = config, build
        self.folder = Path(tempfile.mkdtemp(prefix="box-", dir=parent))
        self._zygote = zygote
        self.channel = zygote.spawn("box")

    def load(self, source: str, task: Task, slots: Slots, native: str = "") -> None:
        """Tell the supervisor what to run; returns at once."""
        for name in ("scratch", "lib"):
            (self.folder / name).mkdir()
        config, zygote, scratch = self._config, self._zygote, self.folder / "scratch"
        self._send({
            "world_size": task.world_size, "source": source, "native": native, "slots": SLOTS, "view": zygote.view,
            "walls": [name for name, why_not in zygote.walls.items() if not why_not and name not in config.keep_open],
            "in_capacity": slots.in_capacity, "out_capacity": slots.out_capacity,
            "rank_memory_bytes": min(config.rank_memory_bytes, int(_MEMORY_SHARE * hardware.memory_bytes() / task.world_size)),
            "names": problems.load(task.problem).arguments, "scratch": str(scratch), "store": str(scratch / "store"),
            "read": [*zygote.read_paths, str(self.folder / "lib"), *([native] if native else [])], "write": [str(scratch)],
            **config.model_dump(include={"symmetric_bytes", "disk_bytes", "output_chars", "load_deadline_s"}),
        }, slots.fds)  # fmt: skip

    def await_ready(self) -> None:
        """Wait until every rank has loaded the source.

        Raises:
            BoxFailed: it could not be loaded.
            HarnessError: the supervisor is gone.
        """
        self._receive("ready", self._config.load_deadline_s)

    def call(self, slot: int, nonce: int) -> Call:
        """One call of `solution` on every rank; the ranks are stopped when it returns.

        Raises:
            BoxFailed: a rank failed, or the deadline passed.
            HarnessError: the supervisor is gone.
        """
        deadline = self._config.call_deadline_s
        self._send({"cmd": "call", "slot": slot, "nonce": nonce, "deadline_s": deadline})
        body = self._receive("done", deadline)
        return Call(body["ns"], tuple(body["ranks_ns"]))

    def peak_memory(self) -> list[int | None]:
        """Largest resident set of each rank in bytes."""
        self._send({"cmd": "memory"})
        return list(self._receive("memory", _SLACK_S)["bytes"])

    def close(self) -> None:
        """End the group and wait until it has ended."""
        _hang_up(self.channel)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _send(self, body: Body, fds: tuple[int, ...] = ()) -> None:
        try:
            self.channel.send(body, fds)
        except ChannelClosed as error:
            raise HarnessError(f"the supervisor of the box is gone: {error}") from None

    def _receive(self, wanted: str, deadline_s: float) -> Body:
        while True:
            try:
                body = self.channel.recv(deadline_s + _SLACK_S).body
            except (ChannelClosed, TimeoutError) as error:
                raise HarnessError(f"the supervisor of the box is gone: {error}") from None
            if body["event"] == "compile" and self._build is not None:
                reply = self._build(body["request"], self.folder / "lib")
                self._send({"cmd": "compiled", "rank": body["rank"], "reply": reply})
            elif body["event"] == "failed":
                raise BoxFailed(body, deadline_s)
            elif body["event"] == wanted:
                return body
            else:
                raise HarnessError(f"the supervisor of the box sent {body['event']!r}, wanted {wanted!r}")


class Oracle:
    """Inputs, answers and the judge for one task, and the reference in a box of its own, called just as a candidate is."""

    def __init__(self, zygote: Zygote, task: Task, folder: Path, config: EvalConfig) -> None:
        self.task, self._deadline_s = task, _ORACLE_DEADLINE_S
        self._folder = Path(tempfile.mkdtemp(prefix="oracle-", dir=folder))
        self.channel = zygote.spawn("oracle")
        path = {"path": [p for p in sys.path if p], "store": str(self._folder / "store"), "slots": SLOTS}
        self.channel.send({**path, **vars(task)})
        self._reference = Box(zygote, config, self._folder)
        self._fds: tuple[int, ...] = ()
        self._slots: Slots | None = None

    def ready(self) -> Slots:
        """The arenas for a candidate's box; waits until the group and the reference are up.

        Raises:
            HarnessError: they do not come up.
        """
        if self._slots is None:
            body, self._fds = self._receive(_START_S)
            sizes, half = (body["in"], body["out"]), len(self._fds) // 2
            self._reference.load(_reference_source(self.task), self.task, Slots(self._fds[:half], *sizes))
            self._trusted(self._reference.await_ready)
            self._slots = Slots(self._fds[half:], *sizes)
        return self._slots

    def ask(self, command: str, **details: Any) -> Body:
        """Give an order (`begin`, `fill`, `judge`, `summary`) and wait for its answer.

        Raises:
            HarnessError: the oracle broke or is gone.
        """
        self.ready()
        try:
            self.channel.send({"cmd": command, "deadline_s": self._deadline_s, **details})
        except ChannelClosed as error:
            raise HarnessError(f"the oracle of {self.task.problem} is gone: {error}") from None
        return self._receive(self._deadline_s + _SLACK_S)[0]

    def call(self, slot: int, nonce: int) -> Call:
        """One call of the reference on every rank.

        Raises:
            HarnessError: the reference failed.
        """
        return self._trusted(lambda: self._reference.call(slot, nonce))

    def channels(self) -> tuple[Channel, Channel]:
        return self.channel, self._reference.channel

    def _trusted(self, act: Callable[[], _T]) -> _T:
        try:
            return act()
        except BoxFailed as failure:
            raise HarnessError(f"the reference of {self.task.problem} failed: {failure.report}") from None

    def _receive(self, timeout: float) -> tuple[Body, tuple[int, ...]]:
        try:
            message = self.channel.recv(timeout)
        except (ChannelClosed, TimeoutError) as error:
            raise HarnessError(f"the oracle of {self.task.problem} is gone: {error}") from None
        if message.body.get("event") == "broken":
            raise HarnessError(f"the oracle of {self.task.problem} broke: {message.body['error']}")
        return message.body, message.fds

    def close(self) -> None:
        self._reference.close()
        _hang_up(self.channel)
        for fd in self._fds:
            os.close(fd)
        self._fds = ()
        shutil.rmtree(self._folder, ignore_errors=True)


def _reference_source(task: Task) -> str:
    return problems.reference_source(problems.load(task.problem))
