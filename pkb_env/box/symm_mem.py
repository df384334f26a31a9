"""Symmetric memory between the ranks of one machine: buffers that every rank can read and write, and signals.

The names and their meaning are those of `torch.distributed._symmetric_memory`, here for CPU tensors: allocate with
`empty`, meet with `rendezvous`, reach a peer's buffer with `handle.get_buffer`, synchronise with `handle.barrier` or with
`put_signal` / `wait_signal`.  C++ gets the same through `handle.group_ptr`, a `pkb::Group*` (native/pkb.h).  Memory is
never given back, so allocate once and reuse; every allocation has its own signal pad.

Not here: the memory files (`symm_arena`), the waits (native/pkb.h), deadlines (the supervisor outside), the names that
torch knows (`symm_patch`).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .symm_arena import PAD_BYTES, PAD_WORDS, Allocation, Arena, create

__all__ = ["SymmetricMemory", "attach", "create", "empty", "install", "is_symm_mem_tensor", "rendezvous"]

_arena: Arena | None = None
_handles: dict[tuple[Allocation, tuple[int, ...]], SymmetricMemory] = {}


def attach(
    fds: Sequence[int], rank: int, world_size: int, native_library: str, status_address: int | None = None
) -> None:
    """Map the memory of all ranks into this one.  `status_address`: 64 bytes for what it waits for (see `wait_record`).

    Raises:
        ValueError: the number of descriptors is not the world size, or the rank is none of them.
        OSError: the native library cannot be loaded, or the memory cannot be mapped.
    """
    global _arena  # noqa: PLW0603  one arena per process, as torch has one allocator per process
    if len(fds) != world_size or not 0 <= rank < world_size:
        raise ValueError(f"symmetric memory: rank {rank} of {world_size} came with {len(fds)} descriptors, wanted one per rank")
    _handles.clear()
    _arena = Arena(fds, rank, native_library, status_address)


def _attached() -> Arena:
    if _arena is None:
        raise RuntimeError("this process has no symmetric memory: it is given to the ranks of a box whose backend uses it")
    return _arena


def empty(*size: Any, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> torch.Tensor:
    """An uninitialised (at first zero) contiguous tensor in this rank's symmetric memory.

    Raises:
        MemoryError: the arena is full; says how much was asked for and how much is left.
        RuntimeError: a device other than the CPU.
    """
    if len(size) == 1 and isinstance(size[0], Sequence):
        size = tuple(size[0])
    if torch.device(device or "cpu").type != "cpu":
        raise RuntimeError(f"symmetric memory on {device!r}: these ranks live on the CPU; pass the device of your input tensor")
    arena, dtype = _attached(), dtype or torch.get_default_dtype()
    found = arena.allocate(math.prod(size) * dtype.itemsize)
    return arena.tensor(arena.rank, found.offset + PAD_BYTES, size, dtype)


def is_symm_mem_tensor(tensor: torch.Tensor) -> bool:
    """Whether the tensor was made by `empty`, or is a view of one that was."""
    return _arena is not None and _arena.allocation_of(tensor) is not None


def _members(group: Any) -> tuple[int, ...]:
    """Ranks in the default group of a process group, a group's name, or None for all."""
    if group is None:
        return tuple(range(_attached().world_size))
    if isinstance(group, str):
        resolve = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]  # noqa: SLF001  no public lookup
        group = resolve(group)  # type: ignore[arg-type]
    return tuple(dist.get_process_group_ranks(group))


def rendezvous(tensor: torch.Tensor, group: Any = None) -> SymmetricMemory:
    """Collective: join the tensors that the ranks of `group` (default: all) made with equal calls of `empty`.

    Raises:
        RuntimeError: not a tensor of `empty`, or the ranks bring different ones.
    """
    arena, members = _attached(), _members(group)
    found = arena.allocation_of(tensor)
    if found is None:
        raise RuntimeError("rendezvous: the tensor was not made by symm_mem.empty, so no other rank can reach it")
    if (found, members) not in _handles:
        arena.compare(members, found)
        _handles[found, members] = SymmetricMemory(arena, members, found)
    return _handles[found, members]


class SymmetricMemory:
    """The same allocation on every rank of a group.  Ranks are those of the group; `channel` counts from 0."""

    multicast_ptr = 0
    signal_pad_size = 4 * PAD_WORDS
    device = torch.device("cpu")

    def __init__(self, arena: Arena, members: tuple[int, ...], found: Allocation) -> None:
        self._arena, self._members, self._found = arena, members, found
        self.rank, self.world_size = members.index(arena.rank), len(members)
        self.buffer_size = found.nbytes
        self.signal_pad_ptrs = [arena.bases[m] + found.offset for m in members]
        self.buffer_ptrs = [p + PAD_BYTES for p in self.signal_pad_ptrs]
        self.group_ptr = arena.new_group(members, found)
        """Address of the `pkb::Group` for C++."""
        self._pointers = [(ctypes.c_uint64 * self.world_size)(*p) for p in (self.buffer_ptrs, self.signal_pad_ptrs)]
        self.buffer_ptrs_dev, self.signal_pad_ptrs_dev = map(ctypes.addressof, self._pointers)

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        """A view of a rank's buffer, from element `storage_offset` on.

        Raises:
            ValueError: the view would end behind the buffer.
        """
        return self._view(rank, sizes, dtype, storage_offset, PAD_BYTES, self.buffer_size)

    def get_remote_tensor(self, peer: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The start of a peer's buffer as a tensor."""
        return self.get_buffer(peer, sizes, dtype)

    def get_signal_pad(
        self, rank: int, sizes: Sequence[int] = (), dtype: torch.dtype | None = None, storage_offset: int = 0
    ) -> torch.Tensor:
        """A view of a rank's signal pad: 32-bit tokens, 0 or 1, at `channel * world_size + source rank`."""
        sizes = sizes or (self.signal_pad_size // (dtype or torch.uint32).itemsize - storage_offset,)
        return self._view(rank, sizes, dtype or torch.uint32, storage_offset, 0, self.signal_pad_size)

    def _view(
        self, rank: int, sizes: Sequence[int], dtype: torch.dtype, skip: int, start: int, limit: int
    ) -> torch.Tensor:
        end = (skip + math.prod(sizes)) * dtype.itemsize
        if end > limit or skip < 0:
            raise ValueError(f"a view of {tuple(sizes)} {dtype} from element {skip} on ends at byte {end}, there are {limit}")
        self._known(rank)
        return self._arena.tensor(self._members[rank], self._found.offset + start + skip * dtype.itemsize, sizes, dtype)

    def _known(self, rank: int, channel: int = 0) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in this group of {self.world_size}")
        if not 0 <= channel < PAD_WORDS // self.world_size:
            raise ValueError(f"channel {channel} does not exist; {PAD_WORDS // self.world_size} do, counted from 0")

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Return when every rank is here; `timeout_ms` 0 waits for ever.

        Raises:
            TimeoutError: some rank did not come in time.
        """
        self._known(self.rank, channel)
        self._came("barrier", channel, timeout_ms, self._arena.native.pkb_barrier(self.group_ptr, channel, timeout_ms))

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Leave a token at a rank, once it has taken my last one on this channel.  Raises TimeoutError."""
        self._known(dst_rank, channel)
        missing = self._arena.native.pkb_put_signal(self.group_ptr, dst_rank, channel, timeout_ms)
        self._came("put_signal", channel, timeout_ms, missing)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Take the token of a rank, once it is there.  Raises TimeoutError."""
        self._known(src_rank, channel)
        missing = self._arena.native.pkb_wait_signal(self.group_ptr, src_rank, channel, timeout_ms)
        self._came("wait_signal", channel, timeout_ms, missing)

    def _came(self, operation: str, channel: int, timeout_ms: int, missing: int) -> None:
        if missing >= 0:
            raise TimeoutError(
                f"rank {self.rank}: {operation} on channel {channel} waited {timeout_ms} ms for rank {missing}, which never came"
            )


def hand_over() -> None:
    """Answer with torch's own symmetric memory, for ranks that have GPUs; `device` is then the current one if not given."""
    import torch.distributed._symmetric_memory as torchs  # noqa: PLC0415

    def empty(*size: Any, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> torch.Tensor:
        return torchs.empty(*size, dtype=dtype, device=torch.device(device or "cuda"))

    def rendezvous(tensor: torch.Tensor, group: Any = None) -> Any:
        return torchs.rendezvous(tensor, dist.group.WORLD if group is None else group)  # type: ignore[arg-type]

    globals().update(empty=empty, rendezvous=rendezvous, is_symm_mem_tensor=getattr(torchs, "is_symm_mem_tensor", None))


def install() -> None:
    """Make `torch.distributed._symmetric_memory` answer on the CPU with what is here."""
    from . import symm_patch  # noqa: PLC0415  imports torch's module, which takes 0.1 s

    symm_patch.install()
