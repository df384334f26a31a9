"""One rank as its supervisor sees it: descriptors, and everything that was heard of it.  Nothing a rank says is trusted."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from typing import Any

from pkb_env.box import control
from pkb_env.box.channel import Channel, ChannelClosed, ChannelViolation
from pkb_env.box.worker import Lines

Body = dict[str, Any]
RAN_ONCE_NS, RAN_EACH_NS = 20_000_000, 200_000
"""How long a stopped rank may seem to run, in all and for each stop.

The kernel keeps the time of a running thread tick by tick (1 to 10 ms), so one that is just being stopped can be read short by a
tick; it also counts what it still does for one that waits for a core.
"""
_STOP_S, _STOP_POLL_S = 1.0, 0.0001
"""A stop reaches a running thread at once, but a hypervisor may hold the core that it runs on, and that counts as running:
however long it takes, `late_ns` charges it."""
_CPUCLOCK_SCHED = 2


@dataclass
class Rank:
    """What the supervisor holds of one rank."""

    rank: int
    channel: Channel
    page: control.Page
    go: int
    done: int
    dump: int
    output: int
    pid: int | None = None
    greeted: bool = False
    ready: Body | None = None
    finished_ns: int | None = None
    raised: Body | None = None
    exit: int | None = None
    violation: str | None = None
    failed_at: float | None = None
    printed: bytearray = field(default_factory=bytearray)
    closed: bool = False
    done_at_cpu_ns: int | None = None
    stopped_at_cpu_ns: int | None = None
    standing: bool = False
    """Whether it was told to stop and not yet to go on."""
    ran_ns: int = 0
    """While it was stopped, in all."""
    stops: int = 0

    @classmethod
    def create(cls, number: int, page: control.Page) -> tuple[Rank, Lines]:
        """Both sides of everything that connects a rank with its supervisor; the page's descriptor is added by the caller."""
        ours, theirs = Channel.pair()
        dump = os.memfd_create(f"pkb-dump-{number}")
        (rank_go, go), (done, rank_done), (output, rank_output) = os.pipe(), os.pipe(), os.pipe()
        for end in (go, done, output):
            os.set_blocking(end, False)
        rank = cls(number, Channel(ours, credentials=True), page, go, done, dump, output)
        return rank, Lines(theirs.detach(), rank_go, rank_done, dump, rank_output, -1)

    @property
    def failed(self) -> bool:
        return self.raised is not None or self.exit is not None or self.violation is not None

    def fail(self, *, raised: Body | None = None, violation: str | None = None) -> None:
        """Note the first failure; what comes later is consequence."""
        if not self.failed:
            self.raised, self.violation, self.failed_at = raised, violation, time.monotonic()

    def end(self, code: int) -> None:
        """Note how the process ended."""
        if self.exit is None:
            self.exit, self.failed_at = code, self.failed_at or time.monotonic()

    def receive(self) -> list[Body]:
        """What the rank has said since the last time; a rank that breaks the protocol has failed."""
        try:
            messages = self.channel.pump()
        except ChannelClosed:
            self.closed = True
            return []
        except ChannelViolation as error:
            self.fail(violation=str(error))
            return []
        for message in messages:
            for fd in message.fds:
                os.close(fd)
            self.pid = self.pid or message.pid
        return [message.body for message in messages]

    def read_output(self, keep: int) -> None:
        """Drain what the rank prints; the first `keep` bytes are kept."""
        try:
            data = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self.output = _closed(self.output)
        self.printed += data[: max(0, keep - len(self.printed))]

    def cpu_ns(self) -> int | None:
        """Processor time of all its threads so far, from the kernel; None once it is gone."""
        if self.pid is None:
            return None
        try:
            return time.clock_gettime_ns((~self.pid << 3) | _CPUCLOCK_SCHED)
        except OSError:
            return None

    def stopped(self) -> None:
        """Wait until it stands still after it was told to stop, and note the processor time it had used by then."""
        end = time.monotonic() + _STOP_S
        self.standing, self.stopped_at_cpu_ns = True, self.cpu_ns()
        while (now := self.cpu_ns()) != self.stopped_at_cpu_ns:
            self.stopped_at_cpu_ns = now
            if time.monotonic() > end:
                self.fail(violation=f"it does not stop within {_STOP_S * 1e3:.0f} ms")
                return
            time.sleep(_STOP_POLL_S)

    def woken(self) -> None:
        """Before it goes on: a stopped process runs no instruction, whatever it arranged to be woken by."""
        if self.stopped_at_cpu_ns is None:
            return
        now = self.cpu_ns()
        self.stops += 1
        self.ran_ns += 0 if now is None else now - self.stopped_at_cpu_ns
        self.stopped_at_cpu_ns = None
        if self.ran_ns > RAN_ONCE_NS + self.stops * RAN_EACH_NS:
            self.fail(violation=f"it ran for {self.ran_ns / 1e6:.1f} ms while it was stopped {self.stops} times")

    def let_go(self) -> None:
        """Wake the rank; only one that does not read, or fills its own pipe, can keep it from being told."""
        try:
            os.write(self.go, b"g")
        except BrokenPipeError as error:
            if self._lives():  # whoever was killed meanwhile has broken nothing, and its end is told
                self.fail(violation=f"it does not take orders: {error.strerror}")
        except OSError as error:
            self.fail(violation=f"it does not take orders: {error.strerror}")

    def _lives(self) -> bool:
        """Whether it still lives a while after it closed its descriptors."""
        end = time.monotonic() + _STOP_S
        while time.monotonic() < end:
            if self.state() in ("Z", "X", ""):
                return False
            time.sleep(_STOP_POLL_S)
        return True

    def state(self) -> str:
        """The kernel's letter for what its first thread does; empty once it is gone."""
        return _state(f"/proc/{self.pid}")

    def running(self) -> bool:
        """Whether any of its threads runs or could."""
        folder = f"/proc/{self.pid}/task"
        with contextlib.suppress(OSError):
            return any(_state(f"{folder}/{thread}") == "R" for thread in os.listdir(folder))
        return False

    def read_done(self) -> None:
        """Note the outside time at which the rank had done what was ordered."""
        now = time.perf_counter_ns()
        try:
            data = os.read(self.done, 1 << 12)
        except BlockingIOError:
            return
        if not data:
            self.done = _closed(self.done)
        elif self.finished_ns is None:
            self.finished_ns, self.done_at_cpu_ns = now, self.cpu_ns()

    def late_ns(self) -> int:
        """Processor time that it used between done and standing still: whatever it did there belongs to its call."""
        if self.done_at_cpu_ns is None or self.stopped_at_cpu_ns is None:
            return 0
        return max(0, self.stopped_at_cpu_ns - self.done_at_cpu_ns)

    def forget_done(self) -> None:
        """Before an order: what the rank said earlier says nothing about it."""
        self.read_done()
        self.finished_ns = None


def _state(folder: str) -> str:
    with contextlib.suppress(OSError, IndexError), open(f"{folder}/stat", encoding="ascii", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0]
    return ""


def _closed(fd: int) -> int:
    """Close a descriptor; -1 in its place is never polled."""
    os.close(fd)
    return -1
