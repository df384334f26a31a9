"""GEMM, then all-reduce (sum): torch multiplies straight into symmetric memory, C++ adds up over the ranks.

The workspace has two halves.  `staged` holds this rank's product, `reduced` its finished share of the sum.  Two barriers are
enough, call after call: a rank multiplies again only after the second barrier, when nobody reads `staged` any more, and
writes `reduced` again only after the next first barrier, which peers reach once they have read it.

Not here: any dtype but float32 in C++; others take the torch path below, in the same memory and in the same order.
"""

from __future__ import annotations

import ctypes

import torch
from pkb_box import compile_cpp, new_output, symm_mem

SOURCE = r"""
extern "C" void sum_products(pkb::Group* group, float* output, size_t n, size_t half) {
  pkb::barrier(group);
  const pkb::Range mine = pkb::share(n, group->world, group->rank);
  float* __restrict reduced = group->buffer<float>(group->rank) + half;
  std::memcpy(reduced + mine.begin, group->buffer<float>(0) + mine.begin, mine.size() * sizeof(float));
  for (int peer = 1; peer < group->world; ++peer) {
    const float* __restrict theirs = group->buffer<float>(peer);
    for (size_t i = mine.begin; i < mine.end; ++i) reduced[i] += theirs[i];
  }
  pkb::barrier(group);
  for (int step = 0; step < group->world; ++step) {
    const int peer = (group->rank + step) % group->world;
    const pkb::Range share = pkb::share(n, group->world, peer);
    std::memcpy(output + share.begin, group->buffer<float>(peer) + half + share.begin, share.size() * sizeof(float));
  }
}
"""

_sum_products = compile_cpp(SOURCE).sum_products
_sum_products.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_size_t] * 2
_sum_products.restype = None
_workspace: symm_mem.SymmetricMemory | None = None


def workspace(half_bytes: int) -> symm_mem.SymmetricMemory:
    """Symmetric memory with two halves of at least so many bytes; allocated at the first call, and when a call needs more."""
    global _workspace
    if _workspace is None or _workspace.buffer_size < 2 * half_bytes:
        size = 2 << max(12, (half_bytes - 1).bit_length())
        _workspace = symm_mem.rendezvous(symm_mem.empty(size, dtype=torch.uint8))
    return _workspace


@torch.no_grad()
def solution(A_local: torch.Tensor, B_local: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks of A_local (M, K) @ B_local (K, N), on every rank."""
    shape, dtype = (A_local.shape[0], B_local.shape[1]), A_local.dtype
    output = new_output(*shape, dtype=dtype)
    memory = workspace(output.nbytes)
    torch.mm(A_local, B_local, out=memory.get_buffer(memory.rank, shape, dtype))
    if dtype != torch.float32:
        return sum_with_torch(memory, output)
    _sum_products(memory.group_ptr, output.data_ptr(), output.numel(), memory.buffer_size // 8)
    return output


def sum_with_torch(memory: symm_mem.SymmetricMemory, output: torch.Tensor) -> torch.Tensor:
    """Adds up the products of all ranks, 16-bit floats in float32."""
    memory.barrier()
    views = [memory.get_buffer(peer, output.shape, output.dtype) for peer in range(memory.world_size)]
    wide = torch.float32 if output.dtype in (torch.bfloat16, torch.float16) else output.dtype
    total = views[0].to(wide, copy=True)
    for view in views[1:]:
        total += view
    memory.barrier()
    return output.copy_(total)
