"""Cross entropy over a vocabulary split by ranks, in CUDA over symmetric memory, with one exchange per token.

Axes  ... tokens, V = vocabulary / W entries per rank; rank r owns entries [r*V, (r+1)*V).

Three kernels.  The first, a block for each token, sums exponentials against the rank's own largest logit and shows (largest, sum,
logit of the target) to all.  The second, a few blocks that meet their like on the other ranks, moves the sums to the largest
logit of all ranks and adds them up.  The third subtracts that largest one from the caller's logits, in place.

Calls use the two halves of the workspace in turn, so nobody waits at the end: a half is written again two calls later, when every
peer has met this rank in the call between, which it begins after it has read that half.

Not here: any arithmetic but float32, any dtype but float32 and bfloat16.
"""

from __future__ import annotations

import ctypes
from collections import Counter

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from pkb_box import compile_cuda, new_output

SOURCE = r"""
constexpr int kThreads = 512, kMostBlocks = 16;  // few blocks where they wait for peers, which may share the GPU
constexpr int kWarp = 32;

struct Group {
  char** buffers;
  uint32_t** pads;
  int rank, world;
};

struct Token {
  float largest, sum, target;  // of one rank's logits; no target: 0
};

template <class Combine> __device__ float over_block(float value, Combine combine) {
  __shared__ float of_warp[kThreads / kWarp];
  for (int other = kWarp / 2; other > 0; other /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, other));
  __syncthreads();
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = of_warp[0];
  for (int warp = 1; warp < kThreads / kWarp; ++warp) value = combine(value, of_warp[warp]);
  return value;
}

template <class T> __global__ void look(const T* logits, const int64_t* targets, size_t n, int64_t first_id, Token* told) {
  const T* row = logits + blockIdx.x * n;
  float largest = -INFINITY, sum = 0.0f;
  for (size_t i = threadIdx.x; i < n; i += kThreads) largest = fmaxf(largest, float(row[i]));
  largest = over_block(largest, [](float a, float b) { return fmaxf(a, b); });
  for (size_t i = threadIdx.x; i < n; i += kThreads) sum += expf(float(row[i]) - largest);
  sum = over_block(sum, [](float a, float b) { return a + b; });
  if (threadIdx.x > 0) return;
  const int64_t target = targets[blockIdx.x] - first_id;
  told[blockIdx.x] = {largest, sum, target >= 0 && target < int64_t(n) ? float(row[target]) : 0.0f};
}

template <class T>
__global__ void combine(Group group, const int64_t* targets, T* losses, float* shifts, size_t tokens, size_t n, size_t offset) {
  pkb::barrier_blocks(group.pads, group.rank, group.world);
  for (size_t at = blockIdx.x * kThreads + threadIdx.x; at < tokens; at += gridDim.x * kThreads) {
    float largest = -INFINITY, sum = 0.0f, target = 0.0f;
    for (int rank = 0; rank < group.world; ++rank) {
      const Token told = reinterpret_cast<const Token*>(group.buffers[rank] + offset)[at];
      const float top = fmaxf(largest, told.largest);
      sum = sum * expf(largest - top) + told.sum * expf(told.largest - top);
      largest = top;
      if (targets[at] >= int64_t(rank * n) && targets[at] < int64_t((rank + 1) * n)) target = told.target;
    }
    const bool somewhere = targets[at] >= 0 && targets[at] < int64_t(group.world * n);
    losses[at] = T(logf(sum) - (somewhere ? target - largest : 0.0f));
    shifts[at] = largest;
  }
}

template <class T> __global__ void shift(T* logits, const float* shifts, size_t n) {
  T* row = logits + blockIdx.x * n;
  const float largest = shifts[blockIdx.x];
  for (size_t i = threadIdx.x; i < n; i += kThreads) row[i] = T(float(row[i]) - largest);
}

template <class T>
int launch(Group group, char* staged, void* logits, const int64_t* targets, void* losses, float* shifts, size_t tokens, size_t n,
           size_t offset, cudaStream_t stream) {
  T* rows = static_cast<T*>(logits);
  Token* told = reinterpret_cast<Token*>(staged + offset);
  const size_t wanted = tokens / kThreads + 1;
  const int blocks = wanted < kMostBlocks ? int(wanted) : kMostBlocks;
  look<<<tokens, kThreads, 0, stream>>>(rows, targets, n, int64_t(group.rank * n), told);
  combine<<<blocks, kThreads, 0, stream>>>(group, targets, static_cast<T*>(losses), shifts, tokens, n, offset);
  shift<<<tokens, kThreads, 0, stream>>>(rows, shifts, n);
  return cudaGetLastError();
}

extern "C" int cross_entropy(char** buffers, uint32_t** pads, int rank, int world, char* staged, void* logits,
                             const int64_t* targets, void* losses, float* shifts, size_t tokens, size_t n, size_t offset,
                             bool half_width, cudaStream_t stream) {
  const Group group{buffers, pads, rank, world};
  const auto fitting = half_width ? launch<__nv_bfloat16> : launch<float>;
  return fitting(group, staged, logits, targets, losses, shifts, tokens, n, offset, stream);
}
"""

_cross_entropy = compile_cuda(SOURCE).cross_entropy
_cross_entropy.argtypes = [
    *[ctypes.c_void_p] * 2, *[ctypes.c_int] * 2, *[ctypes.c_void_p] * 5, *[ctypes.c_size_t] * 3, ctypes.c_bool, ctypes.c_void_p,
]  # fmt: skip
_TOKEN_BYTES = 12
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


@torch.no_grad()
def solution(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Loss of every token, in the dtype of the logits (..., V); `target` (...) holds entries of the whole vocabulary."""
    if vocab_parallel_logits.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"logits are float32 or bfloat16 here, got {vocab_parallel_logits.dtype}")
    group = group or dist.group.WORLD
    memory = workspace(_TOKEN_BYTES * target.numel(), group)
    _calls[group] += 1
    logits, targets = vocab_parallel_logits.contiguous(), target.long().contiguous()
    output = new_output(*target.shape, dtype=logits.dtype)
    shifts = torch.empty(target.shape, dtype=torch.float32, device=logits.device)
    error = _cross_entropy(
        memory.buffer_ptrs_dev, memory.signal_pad_ptrs_dev, memory.rank, memory.world_size, _buffers[group].data_ptr(),
        logits.data_ptr(), targets.data_ptr(), output.data_ptr(), shifts.data_ptr(), target.numel(), logits.shape[-1],
        memory.buffer_size // 2 * (_calls[group] % 2), logits.dtype == torch.bfloat16, torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    if not vocab_parallel_logits.is_contiguous():
        vocab_parallel_logits.copy_(logits)
    if error:
        raise RuntimeError(f"the launch failed with CUDA error {error}")
    return output
