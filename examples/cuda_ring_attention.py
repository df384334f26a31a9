"""Exact attention over a sequence split by ranks, in CUDA over symmetric memory: every rank reads the blocks it needs.

Axes  B batch, S positions per rank, H heads, D head size; rank r owns positions [r*S, (r+1)*S).

A few blocks stage keys and values where peers can read them, and meet their like.  Then a kernel that waits for nobody, and so
may fill the GPU, merges chunk after chunk of everybody's keys with running softmax statistics, all in float32: a block of it has
32 queries of one head, eight threads each.

Calls use the two halves of the workspace in turn, so nobody waits at the end: a half is written again two calls later, when every
peer has met this rank in the call between, which it begins after it has read that half.

Not here: tensor cores, causal work shared evenly between ranks, heads of more than 128 elements, any dtype but float32 and
bfloat16.
"""

from __future__ import annotations

import ctypes
from collections import Counter

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from pkb_box import compile_cuda, new_output

SOURCE = r"""
constexpr int kThreads = 512, kMostBlocks = 16;  // of the kernel that waits for peers, which may share the GPU
constexpr int kRows = 32, kKeys = 32;            // of a tile of scores
constexpr int kLanes = 8;                        // threads of a query
constexpr int kMostElements = 128 / kLanes;      // of a head, for one thread

struct Group {
  char** buffers;
  uint32_t** pads;
  int rank, world;
};

struct Extents {
  int batch, positions, heads, size;
  __device__ size_t at(int batch_index, int position, int head) const {
    return ((size_t(batch_index) * positions + position) * heads + head) * size;
  }
  __host__ __device__ size_t count() const { return size_t(batch) * positions * heads * size; }
};

// Keys, then values, at `offset` of the own workspace; returns when all ranks' are there.
template <class T> __global__ void stage(Group group, const T* k, const T* v, size_t n, size_t offset) {
  T* staged = reinterpret_cast<T*>(group.buffers[group.rank] + offset);
  for (size_t i = blockIdx.x * kThreads + threadIdx.x; i < n; i += gridDim.x * kThreads) {
    staged[i] = k[i];
    staged[n + i] = v[i];
  }
  pkb::barrier_blocks(group.pads, group.rank, group.world);
}

template <class Combine> __device__ float over_lanes(float value, Combine combine) {
  for (int other = kLanes / 2; other > 0; other /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, other));
  return value;
}

// A tile of [rows][size] elements as float, rows of `stride` floats; rows behind `count` are zero.
template <class T> __device__ void fetch(const T* from, size_t row, int count, int rows, int size, float* to, int stride) {
  for (int i = threadIdx.x; i < rows * size; i += blockDim.x)
    to[i / size * stride + i % size] = i / size < count ? float(from[i / size * row + i % size]) : 0.0f;
}

template <class T>
__global__ void attend(Group group, const T* q, T* output, Extents x, size_t offset, float scale, bool causal) {
  extern __shared__ float memory[];
  const int stride = x.size + 1 - x.size % 2;  // odd, so that eight rows lie in eight banks
  float *queries = memory, *keys = queries + kRows * stride, *values = keys + kKeys * stride, *weights = values + kKeys * stride;
  const int first = blockIdx.x * kRows, head = blockIdx.y % x.heads, batch = blockIdx.y / x.heads;
  const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const size_t next = size_t(x.heads) * x.size;  // from one position to the next
  fetch(q + x.at(batch, first, head), next, x.positions - first, kRows, x.size, queries, stride);

  float sum[kMostElements] = {}, largest = -INFINITY, weight = 0.0f;
  for (int rank = 0; rank < (causal ? group.rank + 1 : group.world); ++rank) {
    const bool own = causal && rank == group.rank;  // later positions than the query's are hidden
    const T* staged = reinterpret_cast<const T*>(group.buffers[rank] + offset);
    const int seen = own ? min(x.positions, first + kRows) : x.positions;
    for (int key = 0; key < seen; key += kKeys) {
      __syncthreads();
      fetch(staged + x.at(batch, key, head), next, x.positions - key, kKeys, x.size, keys, stride);
      fetch(staged + x.count() + x.at(batch, key, head), next, x.positions - key, kKeys, x.size, values, stride);
      __syncthreads();

      float score[kKeys / kLanes] = {}, top = largest, total = 0.0f;
      for (int d = 0; d < x.size; ++d)
        for (int j = 0; j < kKeys / kLanes; ++j) score[j] += queries[row * stride + d] * keys[(lane + j * kLanes) * stride + d];
      for (int j = 0; j < kKeys / kLanes; ++j) {
        const int position = key + lane + j * kLanes;
        score[j] = position < x.positions && (!own || position <= first + row) ? scale * score[j] : -INFINITY;
        top = fmaxf(top, score[j]);
      }
      top = over_lanes(top, [](float a, float b) { return fmaxf(a, b); });
      for (int j = 0; j < kKeys / kLanes; ++j) {
        const float part = expf(score[j] - top);
        weights[row * kKeys + lane + j * kLanes] = part;
        total += part;
      }
      total = over_lanes(total, [](float a, float b) { return a + b; });
      const float keep = expf(largest - top);
      weight = weight * keep + total;
      largest = top;
      __syncwarp();  // the lanes of a query are in one warp, and read each other's weights
#pragma unroll
      for (int i = 0; i < kMostElements; ++i) {
        const int d = lane + i * kLanes;
        if (d >= x.size) continue;
        sum[i] *= keep;
        for (int j = 0; j < kKeys; ++j) sum[i] += weights[row * kKeys + j] * values[j * stride + d];
      }
    }
  }
  if (first + row >= x.positions) return;
#pragma unroll
  for (int i = 0; i < kMostElements; ++i) {
    const int d = lane + i * kLanes;
    if (d < x.size) output[x.at(batch, first + row, head) + d] = T(sum[i] / weight);
  }
}

template <class T>
int launch(Group group, const void* q, const void* k, const void* v, void* output, Extents x, size_t offset, float scale,
           bool causal, cudaStream_t stream) {
  const size_t wanted = x.count() / kThreads + 1;
  const int blocks = wanted < kMostBlocks ? int(wanted) : kMostBlocks;
  stage<<<blocks, kThreads, 0, stream>>>(group, static_cast<const T*>(k), static_cast<const T*>(v), x.count(), offset);
  const int stride = x.size + 1 - x.size % 2, bytes = ((kRows + 2 * kKeys) * stride + kRows * kKeys) * sizeof(float);
  const dim3 tiles((x.positions + kRows - 1) / kRows, x.batch * x.heads);
  const cudaError_t error = cudaFuncSetAttribute(attend<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const T* queries = static_cast<const T*>(q);
  attend<<<tiles, kRows * kLanes, bytes, stream>>>(group, queries, static_cast<T*>(output), x, offset, scale, causal);
  return cudaGetLastError();
}

extern "C" int ring_attention(char** buffers, uint32_t** pads, int rank, int world, const void* q, const void* k, const void* v,
                              void* output, const int* extents, size_t offset, float scale, bool causal, bool half_width,
                              cudaStream_t stream) {
  const Group group{buffers, pads, rank, world};
  const Extents x{extents[0], extents[1], extents[2], extents[3]};
  return (half_width ? launch<__nv_bfloat16> : launch<float>)(group, q, k, v, output, x, offset, scale, causal, stream);
}
"""

_ring_attention = compile_cuda(SOURCE).ring_attention
_ring_attention.argtypes = [
    *[ctypes.c_void_p] * 2, *[ctypes.c_int] * 2, *[ctypes.c_void_p] * 5, ctypes.c_size_t, ctypes.c_float, *[ctypes.c_bool] * 2,
    ctypes.c_void_p,
]  # fmt: skip
_MOST_ELEMENTS = 128
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
def solution(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Attention of q (B, S, H, D) to the keys and values of all ranks, in rank order; causal: to positions up to its own."""
    if q.dtype not in (torch.float32, torch.bfloat16) or q.shape[-1] > _MOST_ELEMENTS:
        raise TypeError(f"heads of at most {_MOST_ELEMENTS} float32 or bfloat16, got {q.shape[-1]} {q.dtype}")
    group = group or dist.group.WORLD
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    memory = workspace(k.nbytes + v.nbytes, group)
    _calls[group] += 1
    output = new_output(*q.shape, dtype=q.dtype)
    error = _ring_attention(
        memory.buffer_ptrs_dev, memory.signal_pad_ptrs_dev, memory.rank, memory.world_size, q.data_ptr(), k.data_ptr(),
        v.data_ptr(), output.data_ptr(), (ctypes.c_int * 4)(*q.shape), memory.buffer_size // 2 * (_calls[group] % 2),
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, causal, q.dtype == torch.bfloat16,
        torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    if error:
        raise RuntimeError(f"the launch failed with CUDA error {error}")
    return output
