"""Backend `triton`: Triton kernels and symmetric memory, on GPU ranks."""

from __future__ import annotations

from pkb_env.backends import Backend

_RULES = """\
- Write the work, and the exchange between ranks, as Triton kernels: functions under `@triton.jit` at the top level of the \
module.  They are compiled on their first launch, and once more for every other type, alignment or constant of an argument; the \
untimed calls come first, and while calls are timed nothing can be compiled.  Prefer fixed block sizes to `triton.autotune`.
- Launches go to torch's current stream by themselves.  Do not synchronise the device in `solution`; what is on the stream \
when it returns is waited for.
- Symmetric memory is `torch.distributed._symmetric_memory`: `buf = symm_mem.empty(n, dtype=torch.uint8, device="cuda")`, then \
on every rank in the same order `hdl = symm_mem.rendezvous(buf, dist.group.WORLD)`.  Allocate once and keep it, not in every \
call.
- `hdl.buffer_ptrs_dev` and `hdl.signal_pad_ptrs_dev` are addresses of device arrays with one pointer for each rank.  Pass \
them as integers and read peers' addresses in the kernel: `tl.load(address.to(tl.pointer_type(tl.int64)) + peer)`, then \
`.to(tl.pointer_type(dtype))`; `tl.multiple_of(pointer, 16)` lets Triton load 16 bytes at once.
- A signal pad has a 32-bit word for each (channel, source rank), at `channel * world_size + source_rank`.  To signal, turn \
the word on the destination's pad from 0 to 1; to wait, turn the word on your own pad from 1 to 0; both by `tl.atomic_cas`.  \
So every word is 0 again after the call, as `hdl.barrier(channel=0)` and the next call expect.
- Between GPUs order needs system scope: `sem="release", scope="sys"` to signal and `sem="acquire", scope="sys"` to wait, with \
`tl.debug_barrier()` before a signal so that all threads of the program have stored.
- What another rank wrote may be read only after a barrier or signal; a buffer may be overwritten only after its readers are \
done, also by the next call: a barrier at both ends, or two buffers in turn and one barrier.
- Programs that wait for a peer must all be resident, and where ranks share a GPU they take turns on it: let at most 16 \
programs wait, and never more than fit beside the peers'.
- There is no multicast: `multicast_ptr` is 0 and `multimem` instructions fail.
- `new_output(*shape, dtype=dtype)` from `pkb_box` gives a tensor that is not copied when it is returned; any other tensor is.
"""

_EXAMPLE = '''\
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from pkb_box import new_output


@triton.jit
def meet(pads, rank, world: tl.constexpr):
    """Each program meets the program of its number on every other rank."""
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
def add_first(buffers, pads, x, out, n, rank, world: tl.constexpr, BLOCK: tl.constexpr):
    """Programs exchange the elements that they themselves read, so each may run ahead of the others."""
    addresses = buffers.to(tl.pointer_type(tl.int64))
    mine = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(x.dtype.element_ty)), 16)
    first = tl.multiple_of(tl.load(addresses).to(tl.pointer_type(x.dtype.element_ty)), 16)
    begin, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    for start in range(begin, n, step):
        at = start + tl.arange(0, BLOCK)
        tl.store(mine + at, tl.load(x + at, mask=at < n), mask=at < n)
    meet(pads, rank, world)  # every rank's values are in place
    for start in range(begin, n, step):
        at = start + tl.arange(0, BLOCK)
        own = tl.load(x + at, mask=at < n).to(tl.float32)
        other = tl.load(first + at, mask=at < n).to(tl.float32)
        tl.store(out + at, (own + 2.0 * other).to(x.dtype.element_ty), mask=at < n)
    meet(pads, rank, world)  # everyone has read; the next call may overwrite


buffers, handles = {}, {}


def handle_for(nbytes):
    if nbytes not in handles:
        buffers[nbytes] = symm_mem.empty(nbytes, dtype=torch.uint8, device="cuda")
        handles[nbytes] = symm_mem.rendezvous(buffers[nbytes], dist.group.WORLD)
    return handles[nbytes]


def solution(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    out = new_output(*x.shape, dtype=x.dtype)
    hdl = handle_for(x.nbytes)
    grid = (min(16, triton.cdiv(x.numel(), 4096)),)
    add_first[grid](
        hdl.buffer_ptrs_dev, hdl.signal_pad_ptrs_dev, x, out, x.numel(), hdl.rank, hdl.world_size, BLOCK=4096, num_warps=8
    )
    return out
'''

BACKEND = Backend(
    name="triton",
    topologies=("node", "shared"),
    rules=_RULES,
    toy="every rank adds twice the first rank's tensor to its own",
    example=_EXAMPLE,
)
