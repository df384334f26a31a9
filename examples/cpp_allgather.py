"""All-gather in C++ over symmetric memory: stage the own tensor, signal, copy everybody's.  Any dtype: bytes are bytes.

The signals travel while a rank copies its own tensor to its place, and peers are waited for one by one.

Calls use the two halves of the workspace in turn, so one signal from each peer is enough: a half is written again two calls
later, when every peer has signalled that it is past the call that read it.
"""

from __future__ import annotations

import ctypes

import torch
from pkb_box import compile_cpp, new_output, symm_mem

SOURCE = r"""
extern "C" void allgather(pkb::Group* group, const char* input, char* output, size_t bytes, size_t offset) {
  const int mine = group->rank, world = group->world;
  std::memcpy(group->buffers[mine] + offset, input, bytes);
  for (int step = 1; step < world; ++step) pkb::put_signal(group, (mine + step) % world);
  std::memcpy(output + mine * bytes, input, bytes);
  for (int step = 1; step < world; ++step) {
    const int peer = (mine + step) % world;
    pkb::wait_signal(group, peer);
    std::memcpy(output + peer * bytes, group->buffers[peer] + offset, bytes);
  }
}
"""

_allgather = compile_cpp(SOURCE).allgather
_allgather.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t] * 2
_allgather.restype = None
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
    """The tensors of all ranks, stacked along a new first dimension."""
    global _calls
    tensor = tensor.contiguous()
    memory = workspace(tensor.nbytes)
    _calls += 1
    output = new_output(memory.world_size, *tensor.shape, dtype=tensor.dtype)
    offset = memory.buffer_size // 2 * (_calls % 2)
    _allgather(memory.group_ptr, tensor.data_ptr(), output.data_ptr(), tensor.nbytes, offset)
    return output
