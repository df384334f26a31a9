"""One shared page per rank: what the supervisor asks, and where the rank is.

Layout of a page, little endian: command at 0 (operation, slot, nonce, trial, secret), status at 2048 (phase, number and
name of the last collective), when it did what of the last call at 2560, what symmetric memory waits for at 3072.  The
supervisor trusts nothing it reads here: a candidate's status only words the report of a hang.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import struct
from dataclasses import astuple, dataclass

PAGE = 4096
CALL, FILL, MAP, PROFILE, ANSWER = 1, 2, 3, 4, 5
PHASES = ("start", "init", "load", "ready", "call", "returned", "raised")

_COMMAND = struct.Struct("<IIQQ32s")
_STATUS = struct.Struct("<II48s")
_TIMES = struct.Struct("<QQQQ")
_STATUS_AT, _TIMES_AT, _WAIT_AT = 2048, 2560, 3072
_ENTERED, _LEFT = b">", b"<"
_NO_NAME = re.compile(r"[^A-Za-z0-9_. ]")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True)
class Order:
    """What a supervisor asks of a rank."""

    operation: int
    slot: int = 0
    nonce: int = 0
    trial: int = 0
    secret: bytes = b""
    """32 bytes, for trusted ranks only; a box's page holds zeros here."""


@dataclass(frozen=True)
class Times:
    """When a rank says that it did what of a call, in ns of the clock that all processes of a machine share."""

    woken: int
    called: int
    """Arguments are there, `solution` begins."""
    returned: int
    """And everything that it asked of a GPU is done."""
    written: int
    """Outputs are on the wire."""


@dataclass(frozen=True)
class Status:
    """Where a rank says that it is."""

    phase: str
    sequence: int
    """How many collectives the rank has begun; while it waits for an asynchronous one, the number of that one."""
    collective: str
    """Name of the last collective, empty before the first; `wait for NAME` while its asynchronous work is awaited."""
    inside: bool
    """Whether that collective has not returned."""


def create(world_size: int) -> int:
    """A memory file with one page per rank, sealed so that no rank can shrink it under a reader; the caller owns it."""
    fd = os.memfd_create("pkb-control", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE * world_size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


class Page:
    """The page of one rank, mapped."""

    def __init__(self, fd: int, rank: int) -> None:
        self._map = mmap.mmap(fd, PAGE, offset=rank * PAGE)
        self._phase, self._begun, self._shown, self._name = 0, 0, 0, b""

    @property
    def wait_address(self) -> int:
        """Where symmetric memory notes what it waits for."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + _WAIT_AT

    def wait_record(self) -> bytes:
        """What symmetric memory noted, see `wait_record`."""
        return self._map[_WAIT_AT : _WAIT_AT + 64]

    def put(self, order: Order) -> None:
        """Supervisor: leave an order for the rank."""
        _COMMAND.pack_into(self._map, 0, *astuple(order))

    def order(self) -> Order:
        """Rank: the order that was left."""
        return Order(*_COMMAND.unpack_from(self._map, 0))

    def enter(self, phase: str) -> None:
        """Rank: note the phase, one of `PHASES`."""
        self._phase = PHASES.index(phase)
        self._write()

    def note_times(self, woken: int, called: int, returned: int, written: int) -> None:
        """Rank: when it did what of this call, see `Times`."""
        _TIMES.pack_into(self._map, _TIMES_AT, woken, called, returned, written)

    def times(self) -> Times:
        """Supervisor: what the rank noted of its last call; to be believed of a trusted rank only."""
        return Times(*_TIMES.unpack_from(self._map, _TIMES_AT))

    def begin(self, collective: str) -> int:
        """Rank: note that a collective begins; its number."""
        self._begun += 1
        self._note(self._begun, collective)
        return self._begun

    def await_(self, sequence: int, collective: str) -> None:
        """Rank: note that the asynchronous collective with this number is waited for."""
        self._note(sequence, f"wait for {collective}")

    def end(self) -> None:
        """Rank: note that what it was inside of has returned."""
        self._name = _LEFT + self._name[1:]
        self._write()

    def _note(self, sequence: int, text: str) -> None:
        self._shown, self._name = sequence, _ENTERED + text.encode()[:47]
        self._write()

    def _write(self) -> None:
        _STATUS.pack_into(self._map, _STATUS_AT, self._phase, self._shown, self._name)

    def status(self) -> Status:
        """Supervisor: where the rank says it is; any bytes give some status, with a name of plain letters only."""
        phase, sequence, name = _STATUS.unpack_from(self._map, _STATUS_AT)
        text = name.split(b"\0")[0].decode("ascii", "replace")
        known = PHASES[phase] if phase < len(PHASES) else "unknown"
        return Status(known, sequence, _NO_NAME.sub("?", text[1:]), text.startswith(">"))
