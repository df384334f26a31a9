"""All-reduce, also of products, and all-gather in CUDA over symmetric memory: in one step or two, with words of several widths.

Twins of the ones in C++; where there is no GPU they are compiled only.

Not here: what is around the kernel (`cuda_program`).
"""

from __future__ import annotations

from dataclasses import replace

from training.candidates.choice import Choice
from training.candidates.cuda_program import Kernel, program
from training.candidates.sketch import Family, Flaw, Sketch, fact

_PROBLEMS = ("allreduce", "allgather", "gemm_allreduce")
_EACH = """\
// Calls `body` for this thread's part of [begin, end); which block an index goes to is the same on all ranks.
template <class Body> __device__ void each(size_t begin, size_t end, Body body) {
  @unroll@
  for (size_t i = begin + blockIdx.x * kThreads + threadIdx.x; i < end; i += size_t(gridDim.x) * kThreads) body(i);
}
"""
_SUM_HEAD = f"""\
template <class T> struct alignas(@width@) Pack {{
  static constexpr int kSize = @width@ / sizeof(T);
  T value[kSize];
}};

{_EACH}
template <class T> __device__ Pack<T>* staged(const Group& group, int rank, size_t offset) {{
  return reinterpret_cast<Pack<T>*>(group.buffers[rank] + offset);
}}

template <class T> __device__ Pack<T> read(const T* from, size_t pack, size_t n) {{
  Pack<T> found{{}};
  for (int i = 0; i < Pack<T>::kSize; ++i)
    if (pack * Pack<T>::kSize + i < n) found.value[i] = from[pack * Pack<T>::kSize + i];
  return found;
}}

template <class T> __device__ void write(T* to, size_t pack, size_t n, const Pack<T>& values) {{
  for (int i = 0; i < Pack<T>::kSize; ++i)
    if (pack * Pack<T>::kSize + i < n) to[pack * Pack<T>::kSize + i] = values.value[i];
}}

template <class T> __device__ Pack<T> total(const Group& group, size_t offset, size_t pack) {{
  @real@ sum[Pack<T>::kSize] = {{}};
  for (int rank = @first@; rank < group.world; ++rank) {{
    const Pack<T> theirs = staged<T>(group, rank, offset)[pack];
    for (int i = 0; i < Pack<T>::kSize; ++i) sum[i] += @real@(theirs.value[i]);
  }}
  Pack<T> rounded;
  for (int i = 0; i < Pack<T>::kSize; ++i) rounded.value[i] = T(float(sum[i])@mean@);
  return rounded;
}}
"""
_ONE_STEP = """
template <class T> __global__ void add_up(Group group, const T* input, T* output, size_t n, size_t offset) {
  const size_t packs = (n + Pack<T>::kSize - 1) / Pack<T>::kSize;
  Pack<T>* mine = staged<T>(group, group.rank, offset);
  each(0, packs, [&](size_t pack) { mine[pack] = read(input, pack, n); });
  @open@
  each(0, packs, [&](size_t pack) { write(output, pack, n, total<T>(group, offset, pack)); });
}"""
_TWO_STEPS = """
template <class T> __global__ void add_up(Group group, const T* input, T* output, size_t n, size_t offset) {
  const size_t packs = (n + Pack<T>::kSize - 1) / Pack<T>::kSize;
  const auto share = [&](int rank, auto body) { each(packs * rank / group.world, packs * (rank + 1) / group.world, body); };
  Pack<T>* mine = staged<T>(group, group.rank, offset);
  for (int rank = 0; rank < group.world; ++rank) share(rank, [&](size_t pack) { mine[pack] = read(input, pack, n); });
  @open@
  share(group.rank, [&](size_t pack) {
    const Pack<T> sum = total<T>(group, offset, pack);
    mine[pack] = sum;
    write(output, pack, n, sum);
  });
  @second_open@
  for (int step = 1; step < group.world; ++step) {
    const int peer = (group.rank + step) % group.world;
    const Pack<T>* theirs = staged<T>(group, peer, offset);
    share(peer, [&](size_t pack) { write(output, pack, n, theirs[pack]); });
  }
}"""
_STAGED = """
template <class T> __global__ void add_up(Group group, const T*, T* output, size_t n, size_t offset) {
  const size_t packs = (n + Pack<T>::kSize - 1) / Pack<T>::kSize;
  @open@
  each(0, packs, [&](size_t pack) { write(output, pack, n, total<T>(group, offset, pack)); });
}"""
_PRODUCT = """\
rows, columns = A_local.shape[0], B_local.shape[1]
@memory@ = @workspace@(rows * columns * A_local.itemsize)
first = @memory@.buffer_size // 2 // A_local.itemsize * (@calls@ % 2)
product = @memory@.get_buffer(@memory@.rank, (rows, columns), A_local.dtype, first)
torch.mm(A_local, B_local, out=product)"""
_SUM_LAUNCH = """\
if (wide)
  add_up<float><<<blocks, kThreads, 0, stream>>>(group, static_cast<const float*>(input), static_cast<float*>(output), n, offset);
else
  add_up<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(group, static_cast<const __nv_bfloat16*>(input),
                                                         static_cast<__nv_bfloat16*>(output), n, offset);"""
_GATHER = f"""\
{_EACH}
template <class Word> __global__ void gather(Group group, const Word* input, Word* output, size_t words, size_t offset) {{
  Word* staged = reinterpret_cast<Word*>(group.buffers[group.rank] + offset);
  @own@
  @open@
  for (int step = @first_step@; step < group.world; ++step) {{
    const int peer = (group.rank + step) % group.world;
    const Word* theirs = reinterpret_cast<const Word*>(group.buffers[peer] + offset);
    each(0, words, [&](size_t i) {{ output[@place@ * words + i] = theirs[i]; }});
  }}
}}"""
_GATHER_LAUNCH = """\
if (wide && n % sizeof(@word@) == 0)
  gather<<<blocks, kThreads, 0, stream>>>(group, static_cast<const @word@*>(input), static_cast<@word@*>(output),
                                          n / sizeof(@word@), offset);
else
  gather<<<blocks, kThreads, 0, stream>>>(group, static_cast<const uint16_t*>(input), static_cast<uint16_t*>(output), n / 2,
                                          offset);"""
_OWN = {
    "1": "each(0, words, [&](size_t i) { staged[i] = output[group.rank * words + i] = input[i]; });",
    "0": "each(0, words, [&](size_t i) { staged[i] = input[i]; });",
}
"""By the first step of the loop over peers: whether the own tensor is laid down at once, or collected like the others."""


def write(choice: Choice, problem: str) -> Sketch:
    """One variant."""
    unroll = {"unroll": choice.one(("", "#pragma unroll 2", "#pragma unroll 4"))}
    if problem == "gemm_allreduce":
        return program(choice, _products(_sum(choice, unroll, two=False)))
    return program(choice, _sum(choice, unroll, two=choice.chance(0.5)) if problem == "allreduce" else _gather(choice, unroll))


def _products(kernel: Kernel) -> Kernel:
    """The same sum, of what torch.mm left in symmetric memory; the stream keeps the order."""
    way = "torch.mm writes the local product straight into symmetric memory; one kernel adds up everybody's."
    return replace(
        kernel, native=_SUM_HEAD + _STAGED, shape="rows, columns", amount="rows * columns", wide="product.dtype == torch.float32",
        signature="A_local: torch.Tensor, B_local: torch.Tensor", prepare=_PRODUCT, argument="product",
        facts=(fact(way, "open", "first"), *kernel.facts[1:]),
    )  # fmt: skip


def _sum(choice: Choice, slots: dict[str, str], *, two: bool) -> Kernel:
    real, width = choice.one(("float", "double")), choice.one(("8", "16"))
    slots |= {"real": real, "width": width, "first": "0", "mean": "", "per_thread": choice.one(("4", "8"))}
    slots |= {"second_open": "pkb::barrier_blocks(group.pads, group.rank, group.world);"}
    way = "Two steps: every rank adds up its share, and the others collect it." if two else "One step: all add up everything."
    return Kernel(
        _SUM_HEAD + (_TWO_STEPS if two else _ONE_STEP), _SUM_LAUNCH, choice.one(("allreduce", "sum_over_ranks")), "*tensor.shape",
        "tensor.numel()", "tensor.dtype == torch.float32", slots, (
            fact(way, "open", "second_open", "first"), fact(f"Packs of {width} bytes are added in {real}.", "first", "mean"),
        ), (
            Flaw("leaves one rank out", "WRONG_RESULT", {"first": "1"}),
            Flaw("mean instead of sum", "WRONG_RESULT", {"mean": " / group.world"}),
            Flaw("missing second barrier", "WRONG_RESULT", {"second_open": ""}),
        ),
    )  # fmt: skip


def _gather(choice: Choice, slots: dict[str, str]) -> Kernel:
    first = choice.one(tuple(_OWN))
    slots |= {"own": _OWN[first], "first_step": first, "place": "peer", "word": choice.one(("uint4", "uint2", "uint32_t"))}
    own = "The own tensor is staged and laid down in one pass."
    way = own if first == "1" else "Everybody's tensor is collected from where it was staged."
    return Kernel(
        _GATHER, _GATHER_LAUNCH, choice.one(("allgather", "gather_all", "collect")), "@memory@.world_size, *tensor.shape",
        "tensor.nbytes", "1", slots | {"per_thread": choice.one(("8", "16"))},
        (fact(way, "open", "place"), fact("Words are as wide as `@word@` where the size allows it.")),
        (Flaw("wrong rank order", "WRONG_RESULT", {"place": "(group.world - 1 - peer)"}),
         Flaw("local shape", "WRONG_RESULT", {"returned": "@output@[0]"})),
    )  # fmt: skip


FAMILY = Family("collectives in CUDA", "cuda", _PROBLEMS, write)
