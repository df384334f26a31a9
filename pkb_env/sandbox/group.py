"""A group of rank processes under one supervisor: start them, give orders, wait, stop, report, kill.

The supervisor forks an init process, which puts up the walls and forks the ranks; so the ranks share one domain, the
supervisor stays outside of it, and killing init ends them all.
Not here: what the walls are (`walls`), how a hang is worded (`hang`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from pkb_env.box import control
from pkb_env.box.channel import Channel, ChannelClosed, ChannelUnread
from pkb_env.box.worker import Lines
from pkb_env.sandbox import hearing
from pkb_env.sandbox.descendants import adopt_orphans, end_descendants
from pkb_env.sandbox.init import read_ends, run_init
from pkb_env.sandbox.rank import Body, Rank

_GRACE_S = 0.15
"""How long the other ranks may still report after one has failed."""


class Group:
    """W ranks that live and die together."""

    def __init__(self, world_size: int, upstream: Channel, output_chars: int = 4000) -> None:
        self.world_size, self.upstream, self._output_chars = world_size, upstream, output_chars
        self.ranks: list[Rank] = []
        self.init_pid = 0
        self.compiling: set[int] = set()
        self._requests = 0
        self._notices = -1
        self._held_at = 0
        self.held_ns = 0
        """How long the last order was held up for others."""
        adopt_orphans()

    def start(self, confine: Callable[[], None], rank_main: Callable[[int, Lines], None]) -> None:
        """Fork init and the ranks.

        Args:
            confine: run in init before it forks.
            rank_main: run in each rank with its number and its descriptors; must not return.
        """
        page_fd = control.create(self.world_size)
        lines: list[Lines] = []
        for number in range(self.world_size):
            rank, line = Rank.create(number, control.Page(page_fd, number))
            self.ranks.append(rank)
            lines.append(replace(line, control=page_fd))
        self._notices, notice_writer = os.pipe()
        os.set_blocking(self._notices, False)
        self.init_pid = os.fork()
        if self.init_pid == 0:
            run_init(confine, rank_main, lines, notice_writer)
        os.close(notice_writer)
        os.close(page_fd)
        for line in lines:
            for fd in (line.channel, line.go, line.done, line.output):
                os.close(fd)

    def order(self, order: control.Order) -> int:
        """Tell every rank what to do and let them go; the time of that in ns."""
        for rank in self.ranks:
            rank.forget_done()
            rank.woken()
        now, self.held_ns = time.perf_counter_ns(), 0
        for rank in self.ranks:
            rank.page.put(order)
        self.resume()
        for rank in self.ranks:
            rank.let_go()
        return now

    def all_ready(self) -> bool:
        return all(rank.ready is not None for rank in self.ranks)

    def all_done(self) -> bool:
        return all(rank.finished_ns is not None for rank in self.ranks)

    def wait(self, finished: Callable[[], bool], deadline_s: float) -> str | None:
        """Wait until `finished`, a failure or the deadline; while a compiler works for it or others go first no time counts.

        Returns:
            None when finished, else `failed` or `deadline`.
        """
        used, last = 0.0, time.monotonic()
        while True:
            if finished():
                return None
            if self._failure_is_ripe():
                return "failed"
            if used >= deadline_s:
                return "deadline"
            own = not (self.compiling or self._held_at)  # as it is until something comes
            self._poll(min(deadline_s - used, _GRACE_S if any(r.failed for r in self.ranks) else 60.0), finished)
            now = time.monotonic()
            used += now - last if own else 0.0
            last = now

    def look(self) -> str | None:
        """Handle what has come, and wait for nothing, save while others go first: `failed`, or None."""
        self._poll(0.0, lambda: False)
        while self._held_at:
            self._poll(1.0, lambda: False)
        return "failed" if self._failure_is_ripe() else None

    def _failure_is_ripe(self) -> bool:
        times = [rank.failed_at for rank in self.ranks if rank.failed_at is not None]
        if not times:
            return False
        return all(rank.failed for rank in self.ranks) or time.monotonic() - min(times) > _GRACE_S

    def _poll(self, seconds: float, finished: Callable[[], bool]) -> None:
        """Handle what has come; once the order is finished, what else was said has to wait until the ranks are stopped."""
        done = {rank.done: rank.read_done for rank in self.ranks if rank.done >= 0}
        handlers: dict[int, Callable[[], None]] = {self._notices: self._read_notices, self.upstream.fileno(): self._read_upstream}
        for rank in self.ranks:
            if not rank.closed:
                handlers[rank.channel.fileno()] = partial(self._hear, rank)
            if rank.output >= 0:
                handlers[rank.output] = partial(rank.read_output, self._output_chars)
        poller = select.poll()
        for fd in (*done, *handlers):
            poller.register(fd, select.POLLIN)
        came = [fd for fd, _ in poller.poll(max(0.0, seconds * 1000))]
        for fd in [fd for fd in came if fd in done]:
            done[fd]()
        for fd in [fd for fd in came if fd in handlers]:
            if finished():
                return
            handlers[fd]()

    def _hear(self, rank: Rank) -> None:
        for body in rank.receive():
            self._obey(rank, body)

    def _obey(self, rank: Rank, body: Body) -> None:
        event = body.get("event")
        if event == "hello" and not rank.greeted:
            rank.greeted = True
        elif event == "ready" and rank.ready is None:
            rank.ready = body
        elif event == "raised":
            rank.fail(raised=hearing.failure(body, self.world_size))
        elif event == "compile":
            self._pass_on(rank, body.get("request"))
        else:
            rank.fail(violation=f"a message {str(event)[:40]!r} that no rank may send now")

    def _pass_on(self, rank: Rank, request: object) -> None:
        """Ask for a build; a request that cannot be passed on is refused."""
        self._requests += 1
        try:
            hearing.check_request(request, self._requests / self.world_size)
            self.upstream.send({"event": "compile", "rank": rank.rank, "request": request})
        except ValueError as error:
            self._reply(rank, {"error": f"no build: {error}", "reason": "too large"})
        else:
            self.compiling.add(rank.rank)

    def _read_notices(self) -> None:
        ends = read_ends(self._notices)
        for number, code in ends if ends is not None else [(rank.rank, -signal.SIGKILL) for rank in self.ranks]:
            self._ended(self.ranks[number], code)
        if ends is None:
            self._notices_gone()

    def _notices_gone(self) -> None:
        os.close(self._notices)
        self._notices = os.open(os.devnull, os.O_RDONLY)
        os.set_blocking(self._notices, False)

    def _ended(self, rank: Rank, code: int) -> None:
        if not rank.closed:
            self._hear(rank)
        rank.end(code)

    def _read_upstream(self) -> None:
        for message in self.upstream.pump():
            self.heard(message.body)

    def heard(self, body: Body) -> None:
        """Obey what may be said at any time: a build is there, stand still for others, go on."""
        cmd = body.get("cmd")
        if cmd == "compiled":
            self.built(body)
        elif cmd == "hold":
            standing = not all(rank.standing for rank in self.ranks)
            if standing:
                self.pause()
                self._held_at = time.perf_counter_ns()
            self.upstream.send({"event": "held", "standing": standing})
        elif cmd == "go on":
            self._go_on()
        else:
            raise ChannelClosed(f"asked for {cmd!r} while an order is being carried out")

    def _go_on(self) -> None:
        """End a hold; a group that stood still anyway stays so."""
        if self._held_at:
            self.held_ns += time.perf_counter_ns() - self._held_at
            self._held_at = 0
            self.resume()

    def built(self, body: Body) -> None:
        """Pass on what came of a build; the rank's clock runs again."""
        self.compiling.discard(body["rank"])
        self._reply(self.ranks[body["rank"]], body["reply"])

    def _reply(self, rank: Rank, body: Body) -> None:
        with contextlib.suppress(ChannelClosed):
            try:
                rank.channel.send(body, timeout=0.0 if rank.failed else 1.0)
            except ChannelUnread:
                rank.fail(violation="it does not take the answers to its build requests")

    def pause(self, ranks: Sequence[Rank] | None = None) -> None:
        """Stop every rank, or these, where they are: they keep no core busy and change nothing."""
        moving = [rank for rank in (self.ranks if ranks is None else ranks) if not rank.standing]
        self._signal(signal.SIGSTOP, moving)
        for rank in moving:
            rank.stopped()

    def resume(self, ranks: Sequence[Rank] | None = None) -> None:
        """Let every rank, or these, go on."""
        standing = [rank for rank in (self.ranks if ranks is None else ranks) if rank.standing]
        for rank in standing:
            rank.woken()
            rank.standing = False
        self._signal(signal.SIGCONT, standing)

    def _signal(self, number: int, ranks: Sequence[Rank]) -> None:
        for rank in ranks:
            if rank.pid is not None and rank.exit is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, number)

    def kill(self) -> None:
        """End every process below this one and reap them all."""
        end_descendants()
