"""Reduce-scatter (sum) along dimension 0 in C++ over symmetric memory: stage, barrier, add up the own chunk of everybody.

Calls use the two halves of the workspace in turn, so one barrier is enough: a half is written again two calls later, behind
a barrier that every peer reaches only after it has read that half.

Not here: any dtype but float32 in C++; others are added up by torch, in the same memory and in the same order.
"""

from __future__ import annotations

import ctypes

import torch
from pkb_box import compile_cpp, new_output, symm_mem

SOURCE = r"""
extern "C" void stage(pkb::Group* group, const char* input, size_t bytes, size_t offset) {
  std::memcpy(group->buffers[group->rank] + offset, input, bytes);
  pkb::barrier(group);
}

extern "C" void add_chunk(pkb::Group* group, const float* chunk, float* output, size_t n, size_t offset) {
  std::memcpy(output, chunk, n * sizeof(float));
  for (int step = 1; step < group->world; ++step) {
    const int peer = (group->rank + step) % group->world;
    const float* __restrict theirs = reinterpret_cast<const float*>(group->buffers[peer] + offset) + group->rank * n;
    float* __restrict sum = output;
    for (size_t i = 0; i < n; ++i) sum[i] += theirs[i];
  }
}
"""

_library = compile_cpp(SOURCE)
_library.stage.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_size_t] * 2
_library.add_chunk.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t] * 2
_library.stage.restype = _library.add_chunk.restype = None
_workspace: symm_mem.SymmetricMemory | None = None
_calls = 0


def workspace(half_bytes: int) -> symm_mem.SymmetricMemory:
    """Symmetric memory with two halves of at least so many bytes; allocated at the first call, and when a call needs more."""
    global _workspace
    if _workspace is None or _workspace.buffer_size < 2 * half_bytes:
        size = 2 << max(12, (half_bytes - 1).bit_length())
        _workspace = symm_mem.rendezvous(symm_mem.empty(size, dtype=torch.uint8))
    return _workspace


@torch.no_grad()
def solution(tensor: torch.Tensor) -> torch.Tensor:
    """Rows [r*M, (r+1)*M) of the sum of `tensor` (W*M, ...) over the W ranks, on rank r."""
    global _calls
    tensor = tensor.contiguous()
    memory = workspace(tensor.nbytes)
    _calls += 1
    offset = memory.buffer_size // 2 * (_calls % 2)
    _library.stage(memory.group_ptr, tensor.data_ptr(), tensor.nbytes, offset)
    if tensor.dtype != torch.float32:
        return add_with_torch(memory, tensor, offset)
    chunk = tensor.chunk(memory.world_size)[memory.rank]
    output = new_output(*chunk.shape, dtype=chunk.dtype)
    _library.add_chunk(memory.group_ptr, chunk.data_ptr(), output.data_ptr(), chunk.numel(), offset)
    return output


def add_with_torch(memory: symm_mem.SymmetricMemory, tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """Adds up this rank's chunk, 16-bit floats in float32."""
    first = offset // tensor.itemsize
    views = [memory.get_buffer(peer, tensor.shape, tensor.dtype, first) for peer in range(memory.world_size)]
    chunks = [view.chunk(memory.world_size)[memory.rank] for view in views]
    wide = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
    total = chunks[0].to(wide, copy=True)
    for chunk in chunks[1:]:
        total += chunk
    return total.to(tensor.dtype)
