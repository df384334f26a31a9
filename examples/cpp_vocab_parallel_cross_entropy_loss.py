"""Cross entropy over a vocabulary split by ranks, in C++ over symmetric memory, with one exchange per token.

Axes  ... tokens, V = vocabulary / W entries per rank; rank r owns entries [r*V, (r+1)*V).

A rank sums exponentials against its own largest logit of a token and shows (largest, sum, logit of the target) to all; sums
are moved to the largest logit of all ranks when they are added.  The caller's logits change in place: that largest one is
subtracted.  Tokens go through in blocks, two under way at a time: what was read for the sums is still in the cache when it
is shifted, and a rank works on one block while the signals of the other travel.

Calls use the two halves of the workspace in turn: a half is written again two calls later, when every peer has signalled that
it is past the call that read it.

Not here: any arithmetic but float32, which other dtypes are converted to.
"""

from __future__ import annotations

import ctypes
from collections import Counter

import torch
import torch.distributed as dist
from pkb_box import compile_cpp, new_output, symm_mem

SOURCE = r"""
constexpr size_t kBlock = 1 << 16;  // logits

struct Token {
  float largest, sum, target;  // of one rank's logits; no target: 0
};

static Token look(const float* __restrict logits, size_t n, int64_t target) {
  float largest = -FLT_MAX, sum = 0;
  for (size_t i = 0; i < n; ++i) largest = std::max(largest, logits[i]);
  for (size_t i = 0; i < n; ++i) sum += std::exp(logits[i] - largest);
  return {largest, sum, target >= 0 && target < int64_t(n) ? logits[target] : 0};
}

// The loss of a token of which every rank has told; its logits are shifted.
static float finish(pkb::Group* group, size_t at, float* __restrict logits, size_t n, int64_t target) {
  float largest = -FLT_MAX, sum = 0;
  for (int peer = 0; peer < group->world; ++peer) largest = std::max(largest, group->buffer<Token>(peer)[at].largest);
  for (int peer = 0; peer < group->world; ++peer) {
    const Token& told = group->buffer<Token>(peer)[at];
    sum += told.sum * std::exp(told.largest - largest);
  }
  for (size_t i = 0; i < n; ++i) logits[i] -= largest;
  const bool somewhere = target >= 0 && target < int64_t(n) * group->world;
  return std::log(sum) - (somewhere ? group->buffer<Token>(target / n)[at].target - largest : 0);
}

extern "C" void cross_entropy(pkb::Group* group, float* logits, const int64_t* targets, float* losses, size_t tokens, size_t n,
                              size_t half) {
  Token* told = group->buffer<Token>(group->rank) + half;
  const size_t step = std::max<size_t>(1, kBlock / n), blocks = (tokens + step - 1) / step;
  for (size_t block = 0; block <= blocks; ++block) {
    if (block < blocks) {
      for (size_t t = block * step; t < std::min(tokens, (block + 1) * step); ++t)
        told[t] = look(logits + t * n, n, targets[t] - int64_t(group->rank * n));
      for (int peer = 0; peer < group->world; ++peer)
        if (peer != group->rank) pkb::put_signal(group, peer, block % 2);
    }
    if (block > 0) {
      for (int peer = 0; peer < group->world; ++peer)
        if (peer != group->rank) pkb::wait_signal(group, peer, (block - 1) % 2);
      for (size_t t = (block - 1) * step; t < std::min(tokens, block * step); ++t)
        losses[t] = finish(group, half + t, logits + t * n, n, targets[t]);
    }
  }
}
"""

_cross_entropy = compile_cpp(SOURCE, ["-ffast-math"]).cross_entropy
_cross_entropy.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_size_t] * 3
_cross_entropy.restype = None
_TOKEN_BYTES = 12
_workspaces: dict[dist.ProcessGroup | None, symm_mem.SymmetricMemory] = {}
_calls: Counter[dist.ProcessGroup | None] = Counter()


def workspace(half_bytes: int, group: dist.ProcessGroup | None) -> symm_mem.SymmetricMemory:
    """Symmetric memory with two halves of at least so many bytes; allocated at the first call, and when a call needs more."""
    found = _workspaces.get(group)
    if found is None or found.buffer_size < 2 * half_bytes:
        size = 2 << max(12, (half_bytes - 1).bit_length())
        found = _workspaces[group] = symm_mem.rendezvous(symm_mem.empty(size, dtype=torch.uint8), group)
    return found


@torch.no_grad()
def solution(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Loss of every token, in the dtype of the logits (..., V); `target` (...) holds entries of the whole vocabulary."""
    _calls[group] += 1
    memory = workspace(_TOKEN_BYTES * target.numel(), group)
    logits, targets = vocab_parallel_logits.float().contiguous(), target.long().contiguous()
    losses = new_output(*target.shape, dtype=torch.float32)
    _cross_entropy(
        memory.group_ptr, logits.data_ptr(), targets.data_ptr(), losses.data_ptr(), target.numel(), logits.shape[-1],
        memory.buffer_size // 2 // _TOKEN_BYTES * (_calls[group] % 2),
    )  # fmt: skip
    if logits.data_ptr() != vocab_parallel_logits.data_ptr():
        vocab_parallel_logits.copy_(logits)
    return losses.to(vocab_parallel_logits.dtype)
