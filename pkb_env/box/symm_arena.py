"""The memory below `symm_mem`: one sealed memory file per rank, mapped by all, handed out from the bottom up.

A file holds the signal pad of the rendezvous, a mailbox for it, then allocations, each a signal pad and its buffer.
Nothing is given back: two ranks could not agree when.

Not here: what candidates call (`symm_mem`), the waits (native/pkb.h).
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

PAD_WORDS = 512
"""Tokens of one signal pad."""
PAD_BYTES = 2 * 4 * PAD_WORDS
"""Tokens, then as many counts of sleepers."""
_MAILBOX = struct.Struct("<QQQ")
_MAILBOX_AT = PAD_BYTES
_FIRST_AT = PAD_BYTES + 256
_ALIGN = 256
_SPIN = 300
"""Tries before a wait sleeps: a few microseconds, about a context switch, for ranks may share a core."""
_RENDEZVOUS = 4


def create(world_size: int, bytes_per_rank: int) -> list[int]:
    """One memory file per rank, signal pads included, that can neither grow nor shrink; the caller owns the descriptors."""
    descriptors = []
    for rank in range(world_size):
        fd = os.memfd_create(f"pkb-symmetric-{rank}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, -(-bytes_per_rank // mmap.PAGESIZE) * mmap.PAGESIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        descriptors.append(fd)
    return descriptors


@dataclass(frozen=True)
class Allocation:
    """A signal pad and a buffer behind it, at the same place in the file of every rank."""

    offset: int
    """Of the signal pad."""
    nbytes: int
    """Of the buffer."""

    def __str__(self) -> str:
        return f"{self.nbytes} bytes at offset {self.offset}"


class Arena:
    """The memory files of all ranks, mapped into one rank."""

    def __init__(self, fds: Sequence[int], rank: int, native_library: str, status_address: int | None) -> None:
        self.rank, self.world_size = rank, len(fds)
        self.maps = [mmap.mmap(fd, os.fstat(fd).st_size) for fd in fds]
        self.bases = [ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in self.maps]
        self.capacity = min(len(m) for m in self.maps)
        self.native = _bind(native_library)
        self._top = _FIRST_AT
        self._allocations: dict[int, Allocation] = {}
        self._status_address = status_address or 0
        self._meeting = self.new_group(tuple(range(self.world_size)), Allocation(0, 0), _RENDEZVOUS)

    def allocate(self, nbytes: int) -> Allocation:
        """Room for a buffer.

        Raises:
            MemoryError: there is not enough left.
        """
        left = max(0, self.capacity - self._top - PAD_BYTES)
        if nbytes > left:
            raise MemoryError(
                f"symmetric memory is full: {nbytes} bytes asked for, {left} of {self.capacity} left on rank {self.rank}; "
                "allocations are never given back, so allocate once and reuse the buffer between calls"
            )
        found = Allocation(self._top, nbytes)
        self._top += -(-(PAD_BYTES + nbytes) // _ALIGN) * _ALIGN
        self._allocations[self.bases[self.rank] + found.offset + PAD_BYTES] = found
        return found

    def allocation_of(self, tensor: torch.Tensor) -> Allocation | None:
        """The allocation whose buffer a tensor, or what it is a view of, fills."""
        return self._allocations.get(tensor.untyped_storage().data_ptr())

    def tensor(self, rank: int, offset: int, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The bytes of a rank's file from `offset` on, as a contiguous tensor."""
        count = math.prod(size)
        flat = torch.frombuffer(self.maps[rank], dtype=dtype, count=max(count, 1), offset=offset)
        return flat[:count].view(tuple(size))

    def new_group(self, members: tuple[int, ...], found: Allocation, label: int = 0) -> int:
        """Address of a `pkb::Group` that lives as long as the process."""
        world = len(members)
        words = ctypes.c_uint64 * world
        pads = [self.bases[m] + found.offset for m in members]
        group = self.native.pkb_group_new(
            members.index(self.rank), world, words(*(p + PAD_BYTES for p in pads)), words(*pads),
            (ctypes.c_int32 * world)(*members), found.nbytes, self._status_address, _SPIN, label,
        )  # fmt: skip
        if not group:
            raise RuntimeError(f"symmetric memory: {world} ranks are more than the native library can join")
        return int(group)

    def _meet(self, members: tuple[int, ...]) -> None:
        peers = [m for m in members if m != self.rank]
        for peer in peers:
            self.native.pkb_put_signal(self._meeting, peer, 0, 0)
        for peer in peers:
            self.native.pkb_wait_signal(self._meeting, peer, 0, 0)

    def compare(self, members: tuple[int, ...], mine: Allocation) -> None:
        """Collective: show what this rank brings to a rendezvous and look at what the others bring.

        Raises:
            RuntimeError: they bring something else; on every rank alike.
        """
        digest = zlib.crc32(repr(members).encode())
        _MAILBOX.pack_into(self.maps[self.rank], _MAILBOX_AT, mine.offset, mine.nbytes, digest)
        self._meet(members)
        brought = {m: _MAILBOX.unpack_from(self.maps[m], _MAILBOX_AT) for m in members}
        self._meet(members)
        for other, (offset, nbytes, group) in brought.items():
            theirs = Allocation(offset, nbytes)
            if theirs != mine or group != digest:
                raise RuntimeError(
                    f"rendezvous: rank {self.rank} brings {mine}, rank {other} brings {theirs}"
                    f"{'' if group == digest else ' for another process group'}; every rank must allocate and rendezvous "
                    "the same tensors in the same order"
                )


def _bind(path: str) -> ctypes.CDLL:
    native = ctypes.CDLL(path)
    pointer, i32, i64, u64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint64
    native.pkb_group_new.restype = pointer
    native.pkb_group_new.argtypes = [i32, i32, pointer, pointer, pointer, u64, u64, i32, ctypes.c_uint32]
    native.pkb_barrier.argtypes = [pointer, i32, i64]
    native.pkb_put_signal.argtypes = native.pkb_wait_signal.argtypes = [pointer, i32, i32, i64]
    return native
