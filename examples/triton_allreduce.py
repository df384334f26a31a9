"""All-reduce (sum) in Triton over symmetric memory, in one step or in two.

One step: stage the input, meet, add up what everybody staged.  Two steps, for large tensors on three or more ranks, where that
would read too much: add up the own share only, meet again, collect the others' sums.  Sums accumulate in float32.

Programs of one number work on the same elements on all ranks, so it is enough that they meet each other.  Calls use the two
halves of the workspace in turn, so nobody waits at the end: a half is written again two calls later, when every peer has met this
rank in the call between, which it begins after it has read that half.

Not here: any dtype but float32, bfloat16 and float16.
"""

# ruff: noqa: ANN001, ANN201  (Triton types kernels when they are launched)

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from pkb_box import new_output

_BLOCK = 4096
_MOST_PROGRAMS = 16
"""Few: they wait for peers, which may share the GPU."""
_ONE_STEP_BYTES = 256 << 10
_buffer: torch.Tensor | None = None
_workspace: symm_mem._SymmetricMemory | None = None
_calls = 0


def workspace(half_bytes: int) -> symm_mem._SymmetricMemory:
    """Symmetric memory with two halves of at least so many bytes; allocated at the first call, and when a call needs more."""
    global _buffer, _workspace
    if _workspace is None or _buffer is None or _buffer.nbytes < 2 * half_bytes:
        size = 2 << max(12, (half_bytes - 1).bit_length())
        _buffer = symm_mem.empty(size, dtype=torch.uint8, device="cuda")
        _workspace = symm_mem.rendezvous(_buffer, dist.group.WORLD)
    return _workspace


@triton.jit
def meet(pads, rank, world: tl.constexpr):
    """Each program meets the program of its number on every other rank; signal pads are zero again afterwards."""
    tl.debug_barrier()
    channel = tl.program_id(0)
    addresses = pads.to(tl.pointer_type(tl.int64))
    mine = tl.load(addresses + rank).to(tl.pointer_type(tl.int32))
    for step in range(1, world):
        theirs = tl.load(addresses + (rank + step) % world).to(tl.pointer_type(tl.int32))
        while tl.atomic_cas(theirs + channel * world + rank, 0, 1, sem="release", scope="sys") != 0:
            pass
    for step in range(1, world):
        peer = (rank + step) % world
        while tl.atomic_cas(mine + channel * world + peer, 1, 0, sem="acquire", scope="sys") != 1:
            pass
    tl.debug_barrier()


@triton.jit
def place(buffers, rank, offset, element: tl.constexpr):
    """Where a rank's workspace holds what this call exchanges; `offset` in bytes."""
    address = tl.load(buffers.to(tl.pointer_type(tl.int64)) + rank) + offset
    return tl.multiple_of(address.to(tl.pointer_type(element)), 16)


@triton.jit
def total(buffers, offset, at, n, world: tl.constexpr, element: tl.constexpr):
    """What all ranks staged, added up in the order of the ranks, so that all get the same."""
    found = tl.zeros(at.shape, tl.float32)
    for rank in range(world):
        found += tl.load(place(buffers, rank, offset, element) + at, mask=at < n, other=0.0).to(tl.float32)
    return found.to(element)


@triton.jit
def in_one_step(buffers, pads, x, out, n, offset, rank, world: tl.constexpr, BLOCK: tl.constexpr):
    """Every rank adds up everything."""
    element: tl.constexpr = x.dtype.element_ty
    mine = place(buffers, rank, offset, element)
    begin, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    for start in range(begin, n, step):
        at = start + tl.arange(0, BLOCK)
        tl.store(mine + at, tl.load(x + at, mask=at < n), mask=at < n)
    meet(pads, rank, world)
    for start in range(begin, n, step):
        at = start + tl.arange(0, BLOCK)
        tl.store(out + at, total(buffers, offset, at, n, world, element), mask=at < n)


@triton.jit
def in_two_steps(buffers, pads, x, out, n, offset, rank, share, world: tl.constexpr, BLOCK: tl.constexpr):
    """Every rank adds up its share, of so many elements, and collects the others'."""
    element: tl.constexpr = x.dtype.element_ty
    mine = place(buffers, rank, offset, element)
    begin, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    for of in range(world):
        end = tl.minimum((of + 1) * share, n)
        for start in range(of * share + begin, end, step):
            at = start + tl.arange(0, BLOCK)
            tl.store(mine + at, tl.load(x + at, mask=at < end), mask=at < end)
    meet(pads, rank, world)
    end = tl.minimum((rank + 1) * share, n)
    for start in range(rank * share + begin, end, step):
        at = start + tl.arange(0, BLOCK)
        found = total(buffers, offset, at, end, world, element)
        tl.store(mine + at, found, mask=at < end)
        tl.store(out + at, found, mask=at < end)
    meet(pads, rank, world)
    for ahead in range(1, world):
        peer = (rank + ahead) % world
        theirs = place(buffers, peer, offset, element)
        end = tl.minimum((peer + 1) * share, n)
        for start in range(peer * share + begin, end, step):
            at = start + tl.arange(0, BLOCK)
            tl.store(out + at, tl.load(theirs + at, mask=at < end), mask=at < end)


@torch.no_grad()
def solution(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of `tensor` over the ranks, as a new tensor on every rank."""
    global _calls
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"float32, bfloat16 and float16 can be summed here, got {tensor.dtype}")
    tensor, memory = tensor.contiguous(), workspace(tensor.nbytes)
    _calls += 1
    output, n, world = new_output(*tensor.shape, dtype=tensor.dtype), tensor.numel(), memory.world_size
    exchanged = memory.buffer_ptrs_dev, memory.signal_pad_ptrs_dev, tensor, output, n, memory.buffer_size // 2 * (_calls % 2)
    if world > 2 and tensor.nbytes > _ONE_STEP_BYTES:
        share = triton.cdiv(triton.cdiv(n, world), 16) * 16
        programs = min(_MOST_PROGRAMS, triton.cdiv(share, _BLOCK))
        in_two_steps[(programs,)](*exchanged, memory.rank, share, world, BLOCK=_BLOCK, num_warps=8)
    else:
        programs = min(_MOST_PROGRAMS, triton.cdiv(n, _BLOCK))
        in_one_step[(programs,)](*exchanged, memory.rank, world, BLOCK=_BLOCK, num_warps=8)
    return output
