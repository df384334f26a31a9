"""GEMM, then all-reduce (sum): torch multiplies straight into symmetric memory, CUDA adds up over the ranks, both at once.

The product is made in slabs of rows.  While torch multiplies the next slab, a few blocks on a stream of their own add up the
last one over the ranks: in one step, or on three or more ranks and for large slabs in two, where each rank adds up its share and
then collects the others'.  Sums accumulate in float32, in the order of the ranks.

Calls use the two halves of the workspace in turn, so nobody waits at the end: a half is written again two calls later, when every
peer has met this rank in the call between, which it begins after it has read that half.

Not here: a product of its own; any dtype but float32 and bfloat16.
"""

from __future__ import annotations

import ctypes

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from pkb_box import compile_cuda, new_output

SOURCE = r"""
constexpr int kThreads = 512, kMostBlocks = 16;  // few blocks: they wait for peers, which may share the GPU

struct Group {
  char** buffers;
  uint32_t** pads;
  int rank, world;
};

template <class T> struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T value[kSize];
};

// Calls `body` for this thread's part of [begin, end); which block an index goes to is the same on all ranks.
template <class Body> __device__ void each(size_t begin, size_t end, Body body) {
  for (size_t i = begin + blockIdx.x * kThreads + threadIdx.x; i < end; i += gridDim.x * kThreads) body(i);
}

template <class T> __device__ void write(T* to, size_t pack, size_t n, const Pack<T>& values) {
  const size_t at = pack * Pack<T>::kSize;
  if (at + Pack<T>::kSize <= n) {
    *reinterpret_cast<Pack<T>*>(to + at) = values;
  } else {
    for (int i = 0; i < Pack<T>::kSize; ++i)
      if (at + i < n) to[at + i] = values.value[i];
  }
}

// A rank's product; what lies behind its end in the last pack is added up and not written.
template <class T> __device__ Pack<T>* product(const Group& group, int rank, size_t offset) {
  return reinterpret_cast<Pack<T>*>(group.buffers[rank] + offset);
}

template <class T> __device__ Pack<T> total(const Group& group, size_t offset, size_t pack) {
  float sum[Pack<T>::kSize] = {};
  for (int rank = 0; rank < group.world; ++rank) {
    const Pack<T> theirs = product<T>(group, rank, offset)[pack];
    for (int i = 0; i < Pack<T>::kSize; ++i) sum[i] += float(theirs.value[i]);
  }
  Pack<T> rounded;
  for (int i = 0; i < Pack<T>::kSize; ++i) rounded.value[i] = T(sum[i]);
  return rounded;
}

template <class T> __global__ void in_one_step(Group group, T* output, size_t n, size_t offset) {
  pkb::barrier_blocks(group.pads, group.rank, group.world);
  each(0, (n + Pack<T>::kSize - 1) / Pack<T>::kSize, [&](size_t pack) { write(output, pack, n, total<T>(group, offset, pack)); });
}

template <class T> __global__ void in_two_steps(Group group, T* output, size_t n, size_t offset) {
  const size_t packs = (n + Pack<T>::kSize - 1) / Pack<T>::kSize;
  const auto share = [&](int rank, auto body) { each(packs * rank / group.world, packs * (rank + 1) / group.world, body); };
  pkb::barrier_blocks(group.pads, group.rank, group.world);
  share(group.rank, [&](size_t pack) {
    const Pack<T> sum = total<T>(group, offset, pack);
    product<T>(group, group.rank, offset)[pack] = sum;
    write(output, pack, n, sum);
  });
  pkb::barrier_blocks(group.pads, group.rank, group.world);
  for (int step = 1; step < group.world; ++step) {
    const int peer = (group.rank + step) % group.world;
    share(peer, [&](size_t pack) { write(output, pack, n, product<T>(group, peer, offset)[pack]); });
  }
}

template <class T> int launch(Group group, void* output, size_t n, size_t offset, bool two_steps, cudaStream_t stream) {
  const size_t wanted = n / Pack<T>::kSize / kThreads + 1;
  const int blocks = wanted < kMostBlocks ? int(wanted) : kMostBlocks;
  const auto kernel = two_steps ? in_two_steps<T> : in_one_step<T>;
  kernel<<<blocks, kThreads, 0, stream>>>(group, static_cast<T*>(output), n, offset);
  return cudaGetLastError();
}

extern "C" int sum_products(char** buffers, uint32_t** pads, int rank, int world, void* output, size_t n, size_t offset,
                            bool two_steps, bool half_width, cudaStream_t stream) {
  const Group group{buffers, pads, rank, world};
  return (half_width ? launch<__nv_bfloat16> : launch<float>)(group, output, n, offset, two_steps, stream);
}
"""

_sum_products = compile_cuda(SOURCE).sum_products
_sum_products.argtypes = [
    *[ctypes.c_void_p] * 2, *[ctypes.c_int] * 2, ctypes.c_void_p, *[ctypes.c_size_t] * 2, *[ctypes.c_bool] * 2, ctypes.c_void_p,
]  # fmt: skip
_ONE_STEP_BYTES = 256 << 10
_SLAB_ROWS = 1024
"""At least so many, a multiple of 8, so that every slab begins at a multiple of 16 bytes."""
_side: torch.cuda.Stream | None = None
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


def side_stream() -> torch.cuda.Stream:
    """The stream on which sums run beside products."""
    global _side
    if _side is None:
        _side = torch.cuda.Stream()
    return _side


def add_up(memory: symm_mem._SymmetricMemory, slab: torch.Tensor, offset: int, stream: torch.cuda.Stream) -> None:
    """Sum over the ranks of what lies at `offset` bytes of their workspaces, into a slab of the output."""
    error = _sum_products(
        memory.buffer_ptrs_dev, memory.signal_pad_ptrs_dev, memory.rank, memory.world_size, slab.data_ptr(), slab.numel(),
        offset, memory.world_size > 2 and slab.nbytes > _ONE_STEP_BYTES, slab.dtype == torch.bfloat16, stream.cuda_stream,
    )  # fmt: skip
    if error:
        raise RuntimeError(f"the launch failed with CUDA error {error}")


@torch.no_grad()
def solution(A_local: torch.Tensor, B_local: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks of A_local (M, K) @ B_local (K, N), on every rank."""
    global _calls
    if A_local.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"float32 and bfloat16 can be summed here, got {A_local.dtype}")
    output = new_output(A_local.shape[0], B_local.shape[1], dtype=A_local.dtype)
    memory = workspace(output.nbytes + 16)
    _calls += 1
    offset = memory.buffer_size // 2 * (_calls % 2)
    product = memory.get_buffer(memory.rank, output.shape, output.dtype, offset // output.itemsize)
    here, sums = torch.cuda.current_stream(), torch.cuda.current_stream()
    if len(output) > _SLAB_ROWS:
        sums = side_stream()
    for first in range(0, len(output), _SLAB_ROWS):
        rows = slice(first, first + _SLAB_ROWS)
        torch.mm(A_local[rows], B_local, out=product[rows])
        sums.wait_stream(here)
        add_up(memory, output[rows], offset + first * output.shape[1] * output.itemsize, sums)
    here.wait_stream(sums)
    return output
