"""Exact attention over a sequence split by ranks, in C++ over symmetric memory: every rank reads the blocks it needs.

Axes  B batch, S positions per rank, H heads, D head size; rank r owns positions [r*S, (r+1)*S).

Keys and values are staged once, packed as a product of matrices wants them: panels of 16 columns, row after row.  A rank then
merges chunk after chunk of keys with running softmax statistics, its own before it waits for the others'.  Both products,
scores = queries keys^T and output += weights values, are made of tiles of 6 x 16 sums that stay in registers.

Calls use the two halves of the workspace in turn, so one exchange of signals is enough: a half is written again two calls
later, behind signals that every peer gives only after it has read that half.

Not here: causal work shared evenly between ranks; any arithmetic but float32, which other dtypes are converted to.
"""

from __future__ import annotations

import ctypes
from collections import Counter

import torch
import torch.distributed as dist
from pkb_box import compile_cpp, new_output, symm_mem

SOURCE = r"""
constexpr size_t kRows = 6, kLanes = 16;  // of a tile: 12 vectors of 8 sums, which leaves registers for its operands
constexpr size_t kKeys = 96;              // of a chunk, which stays in the nearest caches; a multiple of both

typedef float Vector __attribute__((vector_size(32), aligned(4), may_alias));

static size_t padded(size_t n, size_t to) { return (n + to - 1) / to * to; }

struct Extents {
  size_t batch, positions, heads, size;
  size_t row() const { return heads * size; }                              // from one position to the next
  size_t keys() const { return padded(positions, kLanes) * size; }         // packed floats of one head
  size_t head() const { return keys() + positions * padded(size, kLanes); }
};

// c[6][16] += a[6][n] b[n][16], where b is a packed panel.
static void add_product(const float* a, size_t a_row, const float* b, size_t n, float* c, size_t c_row) {
  Vector sum[kRows][2] = {};
  for (size_t i = 0; i < n; ++i, b += kLanes) {
    const Vector left = *reinterpret_cast<const Vector*>(b), right = *reinterpret_cast<const Vector*>(b + 8);
    for (size_t r = 0; r < kRows; ++r) {
      sum[r][0] += a[r * a_row + i] * left;
      sum[r][1] += a[r * a_row + i] * right;
    }
  }
  for (size_t r = 0; r < kRows; ++r)
    for (size_t half = 0; half < 2; ++half) *reinterpret_cast<Vector*>(c + r * c_row + 8 * half) += sum[r][half];
}

// Panels of 16 keys, [size][16] each; then panels of 16 value elements, [positions][16] each.  Padding is zero.
static void pack(const float* k, const float* v, float* __restrict to, const Extents& x) {
  for (size_t first = 0; first < x.positions; first += kLanes, to += kLanes * x.size)
    for (size_t j = 0; j < kLanes; ++j)
      for (size_t d = 0; d < x.size; ++d) to[d * kLanes + j] = first + j < x.positions ? k[(first + j) * x.row() + d] : 0.f;
  for (size_t first = 0; first < x.size; first += kLanes)
    for (size_t s = 0; s < x.positions; ++s, to += kLanes)
      for (size_t d = 0; d < kLanes; ++d) to[d] = first + d < x.size ? v[s * x.row() + first + d] : 0.f;
}

// The queries of one head and what they have seen so far.
struct Attention {
  const Extents& x;
  size_t width = padded(x.size, kLanes);
  std::vector<float> queries, sums, largest, weight;  // sums: [queries][width], weighted values

  Attention(const Extents& extents, const float* q, float scale) : x(extents) {
    const size_t rows = padded(x.positions, kRows);
    queries.resize(rows * x.size), sums.resize(rows * width), largest.resize(rows, -FLT_MAX / 2), weight.resize(rows);
    for (size_t s = 0; s < x.positions; ++s)
      for (size_t d = 0; d < x.size; ++d) queries[s * x.size + d] = scale * q[s * x.row() + d];
  }

  // Merge the packed keys and values of a rank; `own`: they stand at the queries' own positions, later ones are hidden.
  void add(const float* packed, bool own) {
    for (size_t key = 0; key < x.positions; key += kKeys)
      for (size_t row = own ? key : 0; row < x.positions; row += kRows)
        add_chunk(packed, key, std::min(kKeys, x.positions - key), row, own);
  }

  void add_chunk(const float* packed, size_t key, size_t keys, size_t row, bool own) {
    float scores[kRows * kKeys] = {};
    for (size_t j = 0; j < keys; j += kLanes)
      add_product(&queries[row * x.size], x.size, packed + (key + j) * x.size, x.size, scores + j, kKeys);
    for (size_t r = 0; r < kRows; ++r)
      weigh(scores + r * kKeys, own ? std::min(keys, row + r + 1 - key) : keys, row + r);
    for (size_t d = 0; d < width; d += kLanes)
      add_product(scores, kKeys, packed + x.keys() + d * x.positions + key * kLanes, keys, &sums[row * width + d], width);
  }

  // Scores of one query to weights, of which the first `seen` count; what was summed before is scaled to the new maximum.
  void weigh(float* __restrict scores, size_t seen, size_t row) {
    std::fill(scores + seen, scores + kKeys, scores[0]);  // any that is no new largest one
    float top = largest[row], total = 0;
    for (size_t j = 0; j < kKeys; ++j) top = std::max(top, scores[j]);
    for (size_t j = 0; j < kKeys; ++j) scores[j] = std::exp(scores[j] - top);
    std::fill(scores + seen, scores + kKeys, 0.f);
    for (size_t j = 0; j < kKeys; ++j) total += scores[j];
    const float keep = std::exp(largest[row] - top);
    if (keep != 1) std::for_each_n(&sums[row * width], width, [keep](float& sum) { sum *= keep; });
    weight[row] = weight[row] * keep + total;
    largest[row] = top;
  }

  void finish(float* output) const {
    for (size_t s = 0; s < x.positions; ++s)
      for (size_t d = 0; d < x.size; ++d) output[s * x.row() + d] = sums[s * width + d] / weight[s];
  }
};

extern "C" void attend(pkb::Group* group, const float* q, const float* k, const float* v, float* output, const size_t* extents,
                       size_t offset, float scale, bool causal) {
  const Extents x{extents[0], extents[1], extents[2], extents[3]};
  const auto staged = [&](int rank, size_t head) { return group->buffer<float>(rank) + offset + head * x.head(); };
  const auto start = [&](size_t head) { return head / x.heads * x.positions * x.row() + head % x.heads * x.size; };
  const size_t heads = x.batch * x.heads;
  const int mine = group->rank;
  for (size_t head = 0; head < heads; ++head) pack(k + start(head), v + start(head), staged(mine, head), x);
  for (int peer = 0; peer < group->world; ++peer) if (peer != mine) pkb::put_signal(group, peer);
  std::vector<Attention> running;
  running.reserve(heads);
  for (size_t head = 0; head < heads; ++head) {
    running.emplace_back(x, q + start(head), scale);
    running.back().add(staged(mine, head), causal);
  }
  for (int peer = 0; peer < group->world; ++peer) if (peer != mine) pkb::wait_signal(group, peer);
  for (size_t head = 0; head < heads; ++head) {
    for (int peer = 0; peer < (causal ? mine : group->world); ++peer)
      if (peer != mine) running[head].add(staged(peer, head), false);
    running[head].finish(output + start(head));
  }
}
"""

_attend = compile_cpp(SOURCE, ["-ffast-math"]).attend
_attend.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_size_t, ctypes.c_float, ctypes.c_bool]
_attend.restype = None
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
def solution(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Attention of q (B, S, H, D) to the keys and values of all ranks, in rank order; causal: to positions up to its own."""
    _calls[group] += 1
    batch, positions, heads, size = q.shape
    floats = batch * heads * (-(-positions // 16) * 16 * size + positions * -(-size // 16) * 16)
    memory = workspace(4 * floats, group)
    queries, keys, values = (x.float().contiguous() for x in (q, k, v))
    output = new_output(*q.shape, dtype=torch.float32) if q.dtype == torch.float32 else torch.empty(q.shape)
    extents = (ctypes.c_size_t * 4)(batch, positions, heads, size)
    _attend(
        memory.group_ptr, queries.data_ptr(), keys.data_ptr(), values.data_ptr(), output.data_ptr(), extents,
        memory.buffer_size // 8 * (_calls[group] % 2), size**-0.5 if softmax_scale is None else softmax_scale, causal,
    )  # fmt: skip
    return output.to(q.dtype)
