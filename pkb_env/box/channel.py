"""Messages between processes of one evaluation: JSON objects with file descriptors, over a socket pair.

The reader assumes a hostile writer: sizes are capped, partial messages never block, unexpected descriptors are closed.
Not here: what the messages mean.
"""

from __future__ import annotations

import array
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
_LENGTH = struct.Struct("<II")
"""Bytes of JSON, and descriptors that belong to this message."""
_CREDENTIALS = struct.Struct("3i")


class ChannelClosed(ConnectionError):
    """The other end is gone."""


class ChannelViolation(ValueError):
    """The other end sent something that is no message."""


@dataclass(frozen=True)
class Message:
    body: dict[str, Any]
    fds: tuple[int, ...] = ()
    pid: int | None = None
    """The sender's process id as the receiver sees it, when the kernel vouches for it."""


class Channel:
    """One end of a socket pair."""

    def __init__(self, sock: socket.socket, *, credentials: bool = False) -> None:
        self.sock = sock
        self._buffer = bytearray()
        self._fds: list[int] = []
        self._pid: int | None = None
        if credentials:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        """Close this end, and the descriptors that came and were not taken."""
        self.sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def send(self, body: dict[str, Any], fds: Sequence[int] = (), *, timeout: float = 10.0) -> None:
        """Send one message.

        Raises:
            ChannelClosed: the other end is gone, or did not read within the timeout in seconds.
        """
        data = json.dumps(body).encode()
        packet = memoryview(_LENGTH.pack(len(data), len(fds)) + data)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        end = time.monotonic() + timeout
        try:
            while packet:
                sent = self._send_some(packet, ancillary, end)
                packet, ancillary = packet[sent:], []
        except OSError as error:
            raise ChannelClosed(f"cannot send: {error}") from None

    def _send_some(self, packet: memoryview, ancillary: list[Any], end: float) -> int:
        while True:
            try:
                return self.sock.sendmsg([packet], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError("the other end does not read") from None
                select.select([], [self.sock], [], left)

    def pump(self) -> list[Message]:
        """Every complete message that has arrived; never blocks.

        Raises:
            ChannelClosed: the other end is gone and nothing is left to read.
            ChannelViolation: what arrived is no message.
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
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (message := self._take()) is None:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"no message within {timeout} s")
            poller = select.poll()
            poller.register(self.sock, select.POLLIN)
            poller.poll(None if left is None else left * 1000 + 1)
            if self._read() and (message := self._take()) is None:
                raise ChannelClosed("the other end closed the channel")
            if message is not None:
                return message
        return message

    def _read(self) -> bool:
        """Move what the kernel holds into the buffer; True when the other end is gone."""
        space = socket.CMSG_SPACE(MAX_FDS * 4) + socket.CMSG_SPACE(_CREDENTIALS.size)
        while True:
            try:
                data, ancillary, _, _ = self.sock.recvmsg(1 << 18, space, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                return True
            for level, kind, payload in ancillary:
                self._accept(level, kind, payload)
            if not data:
                return True
            self._buffer += data
            if len(self._buffer) > MAX_MESSAGE + _LENGTH.size:
                return False

    def _accept(self, level: int, kind: int, payload: bytes) -> None:
        if level != socket.SOL_SOCKET:
            return
        if kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
            self._fds += received
        elif kind == socket.SCM_CREDENTIALS and self._pid is None:
            self._pid = _CREDENTIALS.unpack_from(payload)[0]

    def _take(self) -> Message | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        length, fds = _LENGTH.unpack_from(self._buffer)
        if length > MAX_MESSAGE:
            raise ChannelViolation(f"a message of {length} bytes; at most {MAX_MESSAGE} are taken")
        if len(self._buffer) < _LENGTH.size + length:
            return None
        data = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
        del self._buffer[: _LENGTH.size + length]
        if fds > len(self._fds):
            raise ChannelViolation(f"a message that claims {fds} descriptors and brings {len(self._fds)}")
        mine, self._fds = tuple(self._fds[:fds]), self._fds[fds:]
        return Message(_parse(data), mine, self._pid)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ChannelViolation(f"a message that is no JSON: {type(error).__name__}") from None
    if not isinstance(body, dict):
        raise ChannelViolation(f"a message that is a {type(body).__name__}, not an object")
    return body
