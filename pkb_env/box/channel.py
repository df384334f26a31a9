"""Messages between processes of one evaluation: JSON objects with file descriptors, over a socket pair.

The reader assumes a hostile writer: sizes are capped, partial messages never block, unexpected descriptors are closed.
Not here: what the messages mean.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_MESSAGE = 8 << 20
MAX_FDS = 250
"""The kernel passes at most 253 descriptors in one message."""
_MOST_PENDING = 2 * MAX_FDS
_PUMP = 1 << 20
"""Bytes taken from the kernel in one go, so that a flood from one writer does not hold up the reader's other work."""
_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")


class ChannelClosed(ConnectionError):
    """The other end is gone."""


class ChannelUnread(ChannelClosed):
    """The other end is there and does not read; a part of a message may have been sent, so the channel is of no more use."""


class ChannelViolation(ValueError):
    """The other end sent something that is no message."""


@dataclass(frozen=True)
class Message:
    """A JSON object, with the descriptors that came with it; the receiver closes them."""

    body: dict[str, Any]
    fds: tuple[int, ...] = ()
    pid: int | None = None
    """The sender's process id as the receiver sees it, when the kernel vouches for it."""


class Channel:
    """One end of a socket pair."""

    def __init__(self, sock: socket.socket, *, credentials: bool = False) -> None:
        self.sock = sock
        self._buffer = bytearray()
        self._taken = 0
        """Bytes of the stream that are no longer in the buffer."""
        self._fds: list[tuple[int, int]] = []
        """(position in the stream, descriptor): it came with the bytes that end there."""
        self._pid: int | None = None
        if credentials:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        """Two connected sockets, one for each `Channel`."""
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

    @property
    def peer(self) -> int | None:
        """Process id of the other end, once it has said something and if credentials were asked for."""
        return self._pid

    def fileno(self) -> int:
        """Descriptor to poll; -1 once closed."""
        return self.sock.fileno()

    def close(self) -> None:
        """Close the channel and every descriptor that came without its message."""
        self._drop_fds()
        self.sock.close()

    def send(self, body: dict[str, Any], fds: Sequence[int] = (), *, timeout: float = 10.0) -> None:
        """Send one message.

        Raises:
            ChannelClosed: the other end is gone, or (`ChannelUnread`) did not read within the timeout in seconds.
            ValueError: the message is larger, or has more descriptors, than a reader takes.
        """
        data = json.dumps(body).encode()
        if len(data) > MAX_MESSAGE or len(fds) > MAX_FDS:
            came = f"a message of {len(data)} bytes with {len(fds)} descriptors"
            raise ValueError(f"{came}; at most {MAX_MESSAGE} and {MAX_FDS} are taken")
        packet = memoryview(_LENGTH.pack(len(data)) + data)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        end = time.monotonic() + timeout
        try:
            while packet:
                sent = self._send_some(packet, ancillary, end)
                packet, ancillary = packet[sent:], []
        except TimeoutError as error:
            raise ChannelUnread(f"cannot send: {error}") from None
        except OSError as error:
            raise ChannelClosed(f"cannot send: {error}") from None

    def _send_some(self, packet: memoryview, ancillary: list[Any], end: float) -> int:
        while True:
            try:
                return self.sock.sendmsg([packet], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                if not self._wait(select.POLLOUT, end):
                    raise TimeoutError("the other end does not read") from None

    def _wait(self, event: int, end: float | None) -> bool:
        """Wait until the socket is ready; False when `end` has passed."""
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            return False
        poller = select.poll()
        poller.register(self.sock, event)
        poller.poll(None if left is None else left * 1000 + 1)
        return True

    def pump(self) -> list[Message]:
        """Complete messages that have arrived; never blocks, and leaves what exceeds `_PUMP` bytes for the next call.

        Raises:
            ChannelClosed: the other end is gone and nothing is left to read.
            ChannelViolation: what arrived is no message; every later read raises ChannelClosed.
        """
        closed = self._read()
        messages = []
        while (message := self._take()) is not None:
            messages.append(message)
        if closed and not messages:
            raise ChannelClosed("the other end closed the channel")
        return messages

    def recv(self, timeout: float | None = None) -> Message:
        """The next message.

        Raises:
            TimeoutError: none came within `timeout` seconds.
            ChannelClosed: the other end is gone.
            ChannelViolation: what arrived is no message; every later read raises ChannelClosed.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (message := self._take()) is None:
            closed = self._read()
            if (message := self._take()) is not None:
                break
            if closed:
                raise ChannelClosed("the other end closed the channel")
            if not self._wait(select.POLLIN, end):
                raise TimeoutError(f"no message within {timeout} s")
        return message

    def _read(self) -> bool:
        """Move some of what the kernel holds into the buffer; True when the other end is gone."""
        space = socket.CMSG_SPACE(MAX_FDS * 4) + socket.CMSG_SPACE(_CREDENTIALS.size)
        end = len(self._buffer) + _PUMP
        while len(self._buffer) < end:
            try:
                data, ancillary, _, _ = self.sock.recvmsg(1 << 18, space, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                return True
            self._buffer += data
            for level, kind, payload in ancillary:
                self._accept(level, kind, payload)
            if not data:
                return True
        return False

    def _accept(self, level: int, kind: int, payload: bytes) -> None:
        if level != socket.SOL_SOCKET:
            return
        if kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
            # The kernel ends a read after the segment that carried descriptors, and a segment never spans two messages.
            self._fds += [(self._taken + len(self._buffer), fd) for fd in received]
            if len(self._fds) > _MOST_PENDING:
                raise self._violation(f"more than {_MOST_PENDING} descriptors without their messages")
        elif kind == socket.SCM_CREDENTIALS and self._pid is None:
            self._pid = _CREDENTIALS.unpack_from(payload)[0] or None

    def _take(self) -> Message | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_MESSAGE:
            raise self._violation(f"a message of {length} bytes; at most {MAX_MESSAGE} are taken")
        size = _LENGTH.size + length
        if len(self._buffer) < size:
            return None
        try:
            body = _parse(bytes(self._buffer[_LENGTH.size : size]))
        except ChannelViolation as error:
            raise self._violation(str(error)) from None
        del self._buffer[:size]
        self._taken += size
        fds = tuple(fd for at, fd in self._fds if at <= self._taken)
        self._fds = self._fds[len(fds) :]
        return Message(body, fds, self._pid)

    def _violation(self, text: str) -> ChannelViolation:
        """Nothing after this can be understood: take no more, keep nothing."""
        self._drop_fds()
        self._buffer.clear()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RD)
        return ChannelViolation(text)

    def _drop_fds(self) -> None:
        pending, self._fds = self._fds, []
        for _, fd in pending:
            os.close(fd)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ChannelViolation(f"a message that is no JSON: {type(error).__name__}") from None
    if not isinstance(body, dict):
        raise ChannelViolation(f"a message that is a {type(body).__name__}, not an object")
    return body
