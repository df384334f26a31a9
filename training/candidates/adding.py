"""C++ that adds up what several ranks have, element by element: in blocks, in vectors, or one by one, also in double.

`@add@(to, parts, many, begin, end)` writes elements [begin, end) of the sum of `many` parts.

Not here: who adds what (`cpp_sums`, `cpp_gemm_sum`).
"""

from __future__ import annotations

from training.candidates.choice import Choice
from training.candidates.sketch import Fact, Flaw, fact

_HEAD = "static void @add@(float* to, const float* const* @parts@, int many, size_t begin, size_t end) {"
_BLOCKS = f"""\
@block_constant@

{_HEAD}
  for (size_t at = begin; at < @end@; at += kBlock) {{
    const size_t size = std::min(kBlock, @end@ - at);
    float* __restrict sum = to + at;
    std::memcpy(sum, @parts@[0] + at, size * sizeof(float));
    for (int k = @second@; k < many; ++k) {{
      const float* __restrict term = @parts@[k] + at;
      for (size_t i = 0; i < size; ++i) sum[i] += term[i];
    }}
    @mean_of_block@
  }}
}}"""
_VECTORS = f"""\
typedef float Lanes __attribute__((vector_size(@width@), aligned(4), may_alias));

{_HEAD}
  constexpr size_t kLanes = sizeof(Lanes) / sizeof(float);
  size_t i = begin;
  for (; i + kLanes <= @end@; i += kLanes) {{
    Lanes sum = *reinterpret_cast<const Lanes*>(@parts@[0] + i);
    for (int k = @second@; k < many; ++k) sum += *reinterpret_cast<const Lanes*>(@parts@[k] + i);
    *reinterpret_cast<Lanes*>(to + i) = sum@mean@;
  }}
  for (; i < @end@; ++i) {{
    float sum = @parts@[0][i];
    for (int k = @second@; k < many; ++k) sum += @parts@[k][i];
    to[i] = sum@mean@;
  }}
}}"""
_ONE_BY_ONE = f"""\
{_HEAD}
  @unroll@
  for (size_t i = begin; i < @end@; ++i) {{
    @accumulator@ sum = @parts@[0][i];
    for (int k = @second@; k < many; ++k) sum += @parts@[k][i];
    to[i] = @rounded@;
  }}
}}"""
_WORDS = {
    _BLOCKS: ("Sums run over blocks of @block@ floats, which stay in cache while every term is added.",
              "It adds block by block (@block@ floats), so that the running sum stays in cache."),
    _VECTORS: ("The sum works on vectors of @width@ bytes, with a scalar tail.",
               "Elements are added with @width@-byte vectors; what is left over is done one by one."),
    _ONE_BY_ONE: ("Every element is added up in a register, as @accumulator@.",
                  "For each element the terms are added in one @accumulator@ before anything is written."),
}  # fmt: skip
_FLAWS = (
    Flaw("leaves one rank out", "WRONG_RESULT", {"second": "2"}),
    Flaw("off by one at the end", "WRONG_RESULT", {"end": "end - 1"}),
)
_MEAN = "mean instead of sum"


def adder(choice: Choice) -> tuple[dict[str, str], tuple[Fact, ...], tuple[Flaw, ...]]:
    """Slots of which `adder` is the function's text, what is true of it, and mistakes in it."""
    body = choice.one((_BLOCKS, _VECTORS, _ONE_BY_ONE))
    block, remark = choice.one(("512", "1024", "2048", "4096", "8192")), choice.one(("", "  // floats"))
    accumulator = choice.one(("float", "double"))
    slots = {
        "adder": body, "second": "1", "end": "end", "mean": "", "mean_of_block": "", "block": block,
        "block_constant": f"constexpr size_t kBlock = {block};{remark}",
        "width": choice.one(("16", "32", "64")),
        "accumulator": accumulator,
        "rounded": "sum" if accumulator == "float" else "static_cast<float>(sum)",
        "unroll": choice.one(("", "#pragma GCC unroll 4", "#pragma GCC unroll 8", "#pragma GCC ivdep")),
    }  # fmt: skip
    return slots, (fact(choice.one(_WORDS[body]), "end", "second"),), (*_FLAWS, _mean(body))


def _mean(body: str) -> Flaw:
    changed = {
        _BLOCKS: {"mean_of_block": "for (size_t i = 0; i < size; ++i) sum[i] /= many;"},
        _VECTORS: {"mean": " / static_cast<float>(many)"},
        _ONE_BY_ONE: {"rounded": "sum / many"},
    }
    return Flaw(_MEAN, "WRONG_RESULT", changed[body])
