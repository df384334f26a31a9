"""A box and an oracle as the evaluator sees them: typed calls over their channels.

Not here: the order of an evaluation (`evaluator`), what runs on the other side (`sandbox.box_group`, `oracle`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pkb_env.box.channel import Channel, ChannelClosed
from pkb_env.config import EvalConfig
from pkb_env.errors import HarnessError
from pkb_env.sandbox.launcher import Zygote

SLOTS = 4
_SLACK_S = 30.0
"""How much longer than its own deadline a supervisor may take to answer before it counts as dead."""
Body = dict[str, Any]


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
                with contextlib.suppress(OSError):
                    channel.sock.shutdown(2)

    def check(self) -> None:
        if self._set:
            raise Cancelled

    def watch(self, channel: Channel) -> None:
        with self._lock:
            self._channels.append(channel)
        self.check()

    def forget(self, channel: Channel) -> None:
        with self._lock:
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


class Oracle:
    """Inputs, reference and judge for one task."""

    def __init__(self, zygote: Zygote, task: Task, folder: Path, deadline_s: float) -> None:
        self.task, self._deadline_s = task, deadline_s
        self.folder = Path(tempfile.mkdtemp(prefix="oracle-", dir=folder))
        self.channel = zygote.spawn("oracle")
        config = {"path": [p for p in sys.path if p], "store": str(self.folder / "store"), "slots": SLOTS, **vars(task)}
        self.channel.send(config)
        self._ready: Body | None = None
        self.box_fds: tuple[int, ...] = ()

    def capacities(self) -> tuple[int, int]:
        """Bytes of an input and an output slot; waits until the group is up."""
        if self._ready is None:
            message = self._receive(150.0)
            self._ready, self.box_fds = message[0], message[1]
        return self._ready["in"], self._ready["out"]

    def ask(self, command: str, **details: Any) -> Body:
        """Give an order and wait for its answer.

        Raises:
            HarnessError: the oracle broke or is gone.
        """
        self.capacities()
        self.channel.send({"cmd": command, "deadline_s": self._deadline_s, **details})
        return self._receive(self._deadline_s * 4 + _SLACK_S)[0]

    def call(self, slot: int, nonce: int) -> Call:
        body = self.ask("call", slot=slot, nonce=nonce)
        return Call(body["ns"], tuple(body["ranks_ns"]))

    def _receive(self, timeout: float) -> tuple[Body, tuple[int, ...]]:
        try:
            message = self.channel.recv(timeout)
        except (ChannelClosed, TimeoutError) as error:
            raise HarnessError(f"the reference group of {self.task.problem} is gone: {error}") from None
        if message.body.get("event") == "broken":
            raise HarnessError(f"the reference group of {self.task.problem} broke: {message.body['error']}")
        return message.body, message.fds

    def close(self) -> None:
        self.channel.close()
        for fd in self.box_fds:
            os.close(fd)
        self.box_fds = ()
        shutil.rmtree(self.folder, ignore_errors=True)


class BoxFailed(Exception):  # noqa: N818  a result of the candidate's, not an error of ours
    """The candidate's group failed; carries the supervisor's report."""

    def __init__(self, report: Body, deadline_s: float) -> None:
        super().__init__(report.get("trouble"))
        self.report, self.deadline_s = report, deadline_s


class Box:
    """A candidate's ranks inside their walls."""

    def __init__(self, channel: Channel, config: EvalConfig, build: Callable[[Body], Body]) -> None:
        self.channel, self._config, self._build = channel, config, build

    def await_ready(self) -> None:
        """Wait until every rank has loaded the candidate.

        Raises:
            BoxFailed: it could not be loaded.
        """
        self._receive("ready", self._config.load_deadline_s)

    def call(self, slot: int, nonce: int) -> Call:
        """One call of `solution` on every rank.

        Raises:
            BoxFailed: a rank failed, or the deadline passed.
        """
        deadline = self._config.call_deadline_s
        self.channel.send({"cmd": "call", "slot": slot, "nonce": nonce, "deadline_s": deadline})
        body = self._receive("done", deadline)
        return Call(body["ns"], tuple(body["ranks_ns"]))

    def peak_memory(self) -> list[int | None]:
        """Largest resident set of each rank in bytes."""
        self.channel.send({"cmd": "memory"})
        return list(self._receive("memory", _SLACK_S)["bytes"])

    def _receive(self, wanted: str, deadline_s: float) -> Body:
        while True:
            try:
                body = self.channel.recv(deadline_s + _SLACK_S).body
            except (ChannelClosed, TimeoutError) as error:
                raise HarnessError(f"the supervisor of the box is gone: {error}") from None
            if body["event"] == "compile":
                self.channel.send({"cmd": "compiled", "rank": body["rank"], "reply": self._build(body["request"])})
            elif body["event"] == "failed":
                raise BoxFailed(body, deadline_s)
            elif body["event"] == wanted:
                return body
            else:
                raise HarnessError(f"the supervisor of the box sent {body['event']!r}, wanted {wanted!r}")


@contextmanager
def opened_box(  # noqa: PLR0913  a box is made of these
    zygote: Zygote, config: EvalConfig, oracle: Oracle, source: str, native: str, names: tuple[str, ...],
    folder: Path, build: Callable[[Body], Body], cancellation: Cancellation,
) -> Iterator[Box]:  # fmt: skip
    """A box for one candidate; when the block ends nothing of it is left."""
    channel = zygote.spawn("box")
    cancellation.watch(channel)
    try:
        in_capacity, out_capacity = oracle.capacities()
        for name in ("scratch", "lib"):
            (folder / name).mkdir()
        walls = [name for name, why_not in zygote.walls.items() if not why_not and name not in config.keep_open]
        body = {
            "world_size": oracle.task.world_size, "source": source, "native": native, "walls": walls, "slots": SLOTS,
            "in_capacity": in_capacity, "out_capacity": out_capacity, "names": names, "view": zygote.view,
            "scratch": str(folder / "scratch"), "store": str(folder / "scratch" / "store"),
            "read": [*zygote.read_paths, str(folder / "lib"), *([native] if native else [])],
            "write": [str(folder / "scratch")],
            **config.model_dump(include={"symmetric_bytes", "rank_memory_bytes", "disk_bytes", "output_chars", "load_deadline_s"}),
        }  # fmt: skip
        channel.send(body, oracle.box_fds)
        yield Box(channel, config, build)
    except ChannelClosed as error:
        cancellation.check()
        raise HarnessError(f"the supervisor of the box is gone: {error}") from None
    finally:
        cancellation.forget(channel)
        _end(channel)


def _end(channel: Channel) -> None:
    """Tell the supervisor to end, and wait until it has: it closes its end only after its ranks are reaped."""
    with contextlib.suppress(OSError):
        channel.sock.shutdown(1)
    with contextlib.suppress(ChannelClosed, TimeoutError, ValueError):
        while True:
            channel.recv(_SLACK_S)
    channel.close()
