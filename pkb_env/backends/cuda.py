"""Backend `cuda`: CUDA C++ behind a plain C interface, and symmetric memory, on GPU ranks."""

from __future__ import annotations

from pkb_env.backends import Backend

_RULES = """\
- Write the work, and the exchange between ranks, in CUDA C++.  `compile_cuda(SOURCE)` from `pkb_box` compiles a string once \
for all ranks (C++17, -O3, for this GPU) and gives a `ctypes.CDLL`; call it at the top level of the module, with a string \
literal.
- Functions that Python calls are `extern "C"` and take plain pointers and numbers.  Set `argtypes`: without it ctypes cuts a \
pointer to 32 bits.
- `pkb_cuda.h` is included already, and with it `cuda_runtime.h`, `cuda_bf16.h`, `cuda_fp16.h` and `cstdint`.  Files cannot be \
included by path.
- Launch on torch's stream, `torch.cuda.current_stream().cuda_stream`, and return `cudaGetLastError()` to Python: a launch \
that fails is silent otherwise.  Do not synchronise the device in `solution`; what is on the stream when it returns is waited \
for.
- Symmetric memory is `torch.distributed._symmetric_memory`: `buf = symm_mem.empty(n, dtype=torch.uint8, device="cuda")`, then \
on every rank in the same order `hdl = symm_mem.rendezvous(buf, dist.group.WORLD)`.  Allocate once and keep it, not in every \
call.
- `hdl.buffer_ptrs_dev` and `hdl.signal_pad_ptrs_dev` are addresses of device arrays with one pointer for each rank: kernels \
load and store in the buffers of peers, and signal through their pads.
- A signal pad has a 32-bit word for each (channel, source rank), at `channel * world_size + source_rank`.  To signal, turn \
the word on the destination's pad from 0 to 1; to wait, turn the word on your own pad from 1 to 0; both by compare-and-swap.  \
So every word is 0 again after the call, as `hdl.barrier(channel=0)` and the next call expect.
- In CUDA, with `uint32_t** pads` as above: `pkb::put_signal(pads, rank, peer, world, channel)` and `pkb::wait_signal(pads, \
rank, peer, world, channel)`, each called by one thread of a block between two `__syncthreads()`; `pkb::barrier_blocks(pads, \
rank, world)`, called by all threads, lets block b of every rank wait for block b of every other rank (not for other blocks).
- Those are release and acquire at system scope.  Signals of your own need it too: `__threadfence_system()` and \
`atomicCAS_system`, not `__threadfence()` and `volatile`.  Memory that a peer writes must not be read through `const \
__restrict__` or `__ldg`: their cache is not coherent.
- What another rank wrote may be read only after a barrier or signal; a buffer may be overwritten only after its readers are \
done, also by the next call: a barrier at both ends, or two buffers in turn and one barrier.
- Kernels that wait for a peer must all be resident, and where ranks share a GPU they take turns on it: let at most 16 blocks \
wait, and never more than fit beside the peers'.
- There is no multicast: `multicast_ptr` is 0 and `multimem` instructions fail.
- `new_output(*shape, dtype=dtype)` from `pkb_box` gives a tensor that is not copied when it is returned; any other tensor is.
"""

_EXAMPLE = '''\
import ctypes

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from pkb_box import compile_cuda, new_output

SOURCE = r"""
// Blocks exchange the elements that they themselves read, so each may run ahead of the others.
template <class T>
__global__ void add_first(T** buffers, uint32_t** pads, int rank, int world, const T* x, T* out, size_t n) {
  const size_t begin = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  for (size_t i = begin; i < n; i += step) buffers[rank][i] = x[i];
  pkb::barrier_blocks(pads, rank, world);  // every rank's values are in place
  const T* first = buffers[0];
  for (size_t i = begin; i < n; i += step) out[i] = T(float(x[i]) + 2.0f * float(first[i]));
  pkb::barrier_blocks(pads, rank, world);  // everyone has read; the next call may overwrite
}

template <class T>
int launch(void* buffers, void* pads, int rank, int world, const void* x, void* out, size_t n, cudaStream_t stream) {
  const int blocks = n < 16 * 512 ? (n + 511) / 512 : 16;
  add_first<T><<<blocks, 512, 0, stream>>>((T**)buffers, (uint32_t**)pads, rank, world, (const T*)x, (T*)out, n);
  return cudaGetLastError();
}

extern "C" int add_first_float(void* buffers, void* pads, int rank, int world, const void* x, void* out, size_t n, void* stream) {
  return launch<float>(buffers, pads, rank, world, x, out, n, (cudaStream_t)stream);
}

extern "C" int add_first_bf16(void* buffers, void* pads, int rank, int world, const void* x, void* out, size_t n, void* stream) {
  return launch<__nv_bfloat16>(buffers, pads, rank, world, x, out, n, (cudaStream_t)stream);
}
"""

lib = compile_cuda(SOURCE)
kernels = {torch.float32: lib.add_first_float, torch.bfloat16: lib.add_first_bf16}
for kernel in kernels.values():
    kernel.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int] * 2 + [ctypes.c_void_p] * 2 + [ctypes.c_size_t, ctypes.c_void_p]
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
    stream = torch.cuda.current_stream().cuda_stream
    error = kernels[x.dtype](
        hdl.buffer_ptrs_dev, hdl.signal_pad_ptrs_dev, hdl.rank, hdl.world_size, x.data_ptr(), out.data_ptr(), x.numel(), stream
    )
    if error:
        raise RuntimeError(f"the launch failed with CUDA error {error}")
    return out
'''

BACKEND = Backend(
    name="cuda",
    topologies=("node", "shared"),
    rules=_RULES,
    toy="every rank adds twice the first rank's tensor to its own",
    example=_EXAMPLE,
)
