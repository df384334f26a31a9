"""How a conversation with a supervisor ends, and how another thread gives an evaluation up."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pkb_env.box.channel import Channel, ChannelClosed, ChannelViolation
from pkb_env.errors import HarnessError

_GOODBYE_S = 10.0
"""How long a supervisor may take to kill and reap its group."""
SLACK_S = 30.0
"""How much longer than its own deadline a supervisor may take to answer before it counts as dead."""


def say_goodbye(channel: Channel) -> None:
    """Nothing more will be said: the supervisor ends its group, reaps it and closes its own end."""
    with contextlib.suppress(OSError):
        channel.sock.shutdown(socket.SHUT_WR)


def hang_up(channel: Channel) -> None:
    """Say goodbye and wait until the supervisor has ended; one that does not is killed, and its group with it."""
    say_goodbye(channel)
    if not _ended(channel, _GOODBYE_S) and channel.peer is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(channel.peer, signal.SIGKILL)
        _ended(channel, _GOODBYE_S)
    channel.close()


def _ended(channel: Channel, seconds: float) -> bool:
    end = time.monotonic() + seconds
    try:
        while True:
            channel.recv(max(0.0, end - time.monotonic()))
    except (ChannelClosed, ChannelViolation):
        return True
    except TimeoutError:
        return False


class Cancelled(BaseException):
    """The evaluation was given up; whoever cancelled it does not wait for a verdict."""


class Cancellation:
    """Lets another thread give up an evaluation: closes what it talks through."""

    def __init__(self) -> None:
        self._lock, self._channels, self._set = threading.Lock(), list[Channel](), False
        self.why = ""
        """Why those who wait still want a verdict, INFRA with these words; empty: nobody waits."""

    def cancel(self, why: str = "") -> None:
        with self._lock:
            self._set, self.why = True, self.why or why
            for channel in self._channels:
                say_goodbye(channel)

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
