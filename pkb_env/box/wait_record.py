"""What a rank waits for inside symmetric memory: 64 bytes in shared memory that `native/pkb.h` fills before it sleeps.

The reader trusts nothing: a candidate can write there, so the record only words the report of a hang.

Not here: where the record lies (`control`), who reads it and when (the supervisor).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

SIZE = 64
OPERATIONS = ("", "barrier", "put_signal", "wait_signal", "rendezvous")

_RECORD = struct.Struct("<IiiI")


@dataclass(frozen=True)
class Waiting:
    """A rank sleeps in `operation` until `peer` (rank in the default group) does its part on `channel`."""

    operation: str
    peer: int
    channel: int
    sleeps: int
    """Grows while the rank sleeps; equal in two looks a second apart means that it does not."""

    def __str__(self) -> str:
        return f"{self.operation} on channel {self.channel}: waits for rank {self.peer}"


def read(record: bytes) -> Waiting | None:
    """The wait noted in a record of `SIZE` bytes; None when there is none, or when the bytes make no sense."""
    operation, peer, channel, sleeps = _RECORD.unpack_from(record)
    if not 0 < operation < len(OPERATIONS):
        return None
    return Waiting(OPERATIONS[operation], peer, channel, sleeps)
