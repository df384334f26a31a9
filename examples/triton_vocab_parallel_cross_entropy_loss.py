"""Cross entropy over a vocabulary split by ranks, in Triton over symmetric memory, with one exchange per token.

Axes  ... tokens, V = vocabulary / W entries per rank; rank r owns entries [r*V, (r+1)*V).

Three kernels.  The first, a program for each token, sums exponentials against the rank's own largest logit and shows (largest,
sum, logit of the target) to all.  The second, a few programs that meet their like on the other ranks, moves the sums to the
largest logit of all ranks and adds them up.  The third subtracts that largest one from the caller's logits, in place.

Calls use the two halves of the workspace in turn, so nobody waits at the end: a half is written again two calls later, when every
peer has met this rank in the call between, which it begins after it has read that half.

Not here: any arithmetic but float32.
"""

# ruff: noqa: ANN001, ANN201  (Triton types kernels when they are launched)

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from pkb_box import new_output

_MOST_COLUMNS = 4096
_TOKENS = 128
"""Of a program of the second kernel at a time."""
_MOST_PROGRAMS = 16
"""Few: they wait for peers, which may share the GPU."""
_buffers: dict[dist.ProcessGroup, torch.Tensor] = {}
_workspaces: dict[dist.ProcessGroup, symm_mem._SymmetricMemory] = {}
_calls: Counter[dist.ProcessGroup] = Counter()


def workspace(half_bytes: int, group: dist.ProcessGroup) -> symm_mem._SymmetricMemory:
    """Symmetric memory with two halves of at least so many bytes; allocated at the first call, and when a call needs more."""
    if group not in _buffers or _buffers[group].nbytes < 2 * half_bytes:
        size = 2 << max(12, (half_bytes - 1).bit_length())
        _buffers[group] = symm_mem.empty(size, dtype=torch.uint8, device="cuda")
        _workspaces[group] = symm_mem.rendezvous(_buffers[group], group)
    return _workspaces[group]


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
def look(logits, targets, told, tokens, n, rank, COLUMNS: tl.constexpr):
    """Writes three floats for each token: largest logit, sum of exponentials, logit of the target (no target: 0)."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * n
    largest, total = float("-inf"), 0.0
    for start in range(0, n, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        values = tl.load(row + at, mask=at < n, other=float("-inf")).to(tl.float32)
        top = tl.maximum(largest, tl.max(values, 0))
        total = total * tl.exp(largest - top) + tl.sum(tl.exp(values - top), 0)
        largest = top
    target = tl.load(targets + token) - rank * n
    own = (target >= 0) & (target < n)
    picked = tl.load(row + target, mask=own, other=0.0).to(tl.float32)
    tl.store(told + token, largest)
    tl.store(told + tokens + token, total)
    tl.store(told + 2 * tokens + token, picked)


@triton.jit
def combine(buffers, pads, targets, losses, shifts, tokens, n, offset, rank, world: tl.constexpr, TOKENS: tl.constexpr):
    """Losses, and the largest logits of all ranks."""
    meet(pads, rank, world)
    for start in range(tl.program_id(0) * TOKENS, tokens, tl.num_programs(0) * TOKENS):
        at = start + tl.arange(0, TOKENS)
        inside = at < tokens
        target = tl.load(targets + at, mask=inside, other=-1)
        largest = tl.full([TOKENS], float("-inf"), tl.float32)
        total, picked = tl.zeros([TOKENS], tl.float32), tl.zeros([TOKENS], tl.float32)
        for peer in range(world):
            told = place(buffers, peer, offset, tl.float32)
            theirs = tl.load(told + at, mask=inside, other=0.0)
            top = tl.maximum(largest, theirs)
            part = tl.load(told + tokens + at, mask=inside, other=1.0)
            total = total * tl.exp(largest - top) + part * tl.exp(theirs - top)
            largest = top
            picked += tl.load(told + 2 * tokens + at, mask=inside, other=0.0)
        somewhere = (target >= 0) & (target < world * n)
        loss = tl.log(total) - tl.where(somewhere, picked - largest, 0.0)
        tl.store(losses + at, loss.to(losses.dtype.element_ty), mask=inside)
        tl.store(shifts + at, largest, mask=inside)


@triton.jit
def shift(logits, shifts, n, COLUMNS: tl.constexpr):
    """Subtracts the token's largest logit from a row."""
    token = tl.program_id(0).to(tl.int64)
    row, largest = logits + token * n, tl.load(shifts + token)
    for start in range(0, n, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        values = tl.load(row + at, mask=at < n).to(tl.float32) - largest
        tl.store(row + at, values.to(logits.dtype.element_ty), mask=at < n)


@torch.no_grad()
def solution(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Loss of every token, in the dtype of the logits (..., V); `target` (...) holds entries of the whole vocabulary."""
    group = group or dist.group.WORLD
    tokens, n = target.numel(), vocab_parallel_logits.shape[-1]
    memory = workspace(12 * tokens, group)
    _calls[group] += 1
    offset = memory.buffer_size // 2 * (_calls[group] % 2)
    logits, targets = vocab_parallel_logits.contiguous(), target.long().contiguous()
    told = memory.get_buffer(memory.rank, (3, tokens), torch.float32, offset // 4)
    output = new_output(*target.shape, dtype=logits.dtype)
    shifts = torch.empty(target.shape, dtype=torch.float32, device=logits.device)
    columns = min(_MOST_COLUMNS, triton.next_power_of_2(n))
    look[(tokens,)](logits, targets, told, tokens, n, memory.rank, COLUMNS=columns, num_warps=8)
    combine[(min(_MOST_PROGRAMS, triton.cdiv(tokens, _TOKENS)),)](
        memory.buffer_ptrs_dev, memory.signal_pad_ptrs_dev, targets, output, shifts, tokens, n, offset, memory.rank,
        memory.world_size, TOKENS=_TOKENS,
    )  # fmt: skip
    shift[(tokens,)](logits, shifts, n, COLUMNS=columns, num_warps=8)
    if not vocab_parallel_logits.is_contiguous():
        vocab_parallel_logits.copy_(logits)
    return output
