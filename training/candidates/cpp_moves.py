"""All-gather, broadcast, scatter, gather and all-to-all in C++: bytes are read where staged, or written where wanted.

Every variant is right for any number of ranks, and any dtype: bytes are bytes.

Not here: anything that computes (`cpp_sums`), what is around the kernel (`cpp_program`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from training.candidates.choice import Choice
from training.candidates.cpp_program import Kernel, program
from training.candidates.sketch import Family, Flaw, Sketch, fact

_NATIVE = """\
@copier@

extern "C" void @function@(pkb::Group* @group@, const char* @in@, char* @out@, size_t @n@@root_parameter@@offset_parameter@) {
  const int @me@ = @group@->rank, @world@ = @group@->world@semicolon@
  @root_constant@
  @send@
  @open@
  @fetch@
  @close@
@brace@"""
_BODY = """\
@begin@
@argument@ = @argument@.contiguous()
@find_piece@
@memory@ = @workspace@(dist.get_world_size() * piece)
@output@ = @maker@(@shape@, dtype=@argument@.dtype)
@lib@.@function@(@memory@.@group_ptr@, @argument@.data_ptr(), @output@.@pointer@(), piece@root@@offset@)
@lonely@
return @returned@"""


@dataclass(frozen=True)
class Move:
    """Who sends what to whom.  `own` is what a rank keeps, seen from where it fetches."""

    pull_send: str
    pull_fetch: str
    push_send: str
    push_fetch: str
    shape: str
    piece: str = "@argument@.nbytes"
    signature: str = "tensor: torch.Tensor"
    root: str = ""
    """Name of the argument that says which rank is special."""


def _at(rank: str, index: str = "") -> str:
    """Address in the memory of a rank, so many pieces from its start."""
    return f"@group@->buffers[{rank}]@at@" + (f" + {index} * @n@" if index else "")


def _stacked(theirs: str) -> str:
    """The root lays everybody's piece down; the others copy their own."""
    rooted = f"@each@\n    @copy@({_TO}, @peer@ == @me@ ? @in@ : {theirs}, @n@);"
    return f"if (@me@ == root) {{\n  {rooted}\n}} else {{\n  @copy@(@out@, @in@, @n@);\n}}"


_TO = "@out@ + @place@ * @n@"
_ME, _PEER = "@me@", "@peer@"
_FROM_ROOT = "@me@ == root ? @in@ : "
_MOVES = {
    "allgather": Move(
        f"@copy@({_at(_ME)}, @in@, @n@);",
        f"@each@\n  @copy@({_TO}, @peer@ == @me@ ? @in@ : {_at(_PEER)}, @n@);",
        f"@others@\n  @copy@({_at(_PEER, _ME)}, @in@, @n@);",
        f"@each@\n  @copy@({_TO}, @peer@ == @me@ ? @in@ : {_at(_ME, _PEER)}, @n@);",
        "@memory@.world_size, *tensor.shape",
    ),
    "broadcast": Move(
        f"if (@me@ == root) @copy@({_at(_ME)}, @in@, @n@);",
        f"@copy@(@out@, {_FROM_ROOT}{_at('root')}, @n@);",
        f"if (@me@ == root)\n  @others@\n    @copy@({_at(_PEER)}, @in@, @n@);",
        f"@copy@(@out@, {_FROM_ROOT}{_at(_ME)}, @n@);",
        "*tensor.shape", signature="tensor: torch.Tensor, src: int = 0", root="src",
    ),
    "scatter": Move(
        f"if (@me@ == root) @copy@({_at(_ME)}, @in@, @world@ * @n@);",
        f"@copy@(@out@, ({_FROM_ROOT}{_at('root')}) + @slice@ * @n@, @n@);",
        f"if (@me@ == root)\n  @others@\n    @copy@({_at(_PEER)}, @in@ + @slice_of_peer@ * @n@, @n@);",
        f"@copy@(@out@, @me@ == root ? @in@ + @me@ * @n@ : {_at(_ME)}, @n@);",
        "*(tensor.shape[1:] if dist.get_rank() == src else tensor.shape)",
        piece="tensor.nbytes // (dist.get_world_size() if dist.get_rank() == src else 1)",
        signature="tensor: torch.Tensor, src: int = 0", root="src",
    ),
    "gather": Move(
        f"if (@me@ != root) @copy@({_at(_ME)}, @in@, @n@);",
        _stacked(_at(_PEER)),
        f"if (@me@ != root) @copy@({_at('root', _ME)}, @in@, @n@);",
        _stacked(_at(_ME, _PEER)),
        "*([@memory@.world_size] if dist.get_rank() == dst else []), *tensor.shape",
        signature="tensor: torch.Tensor, dst: int = 0", root="dst",
    ),
    "alltoall": Move(
        f"@copy@({_at(_ME)}, @in@, @world@ * @n@);",
        f"@each@\n  @copy@({_TO}, (@peer@ == @me@ ? @in@ : {_at(_PEER)}) + @slice@ * @n@, @n@);",
        f"@others@\n  @copy@({_at(_PEER, _ME)}, @in@ + @slice_of_peer@ * @n@, @n@);",
        f"@each@\n  @copy@({_TO}, @peer@ == @me@ ? @in@ + @me@ * @n@ : {_at(_ME, _PEER)}, @n@);",
        "*tensor.shape", piece="tensor.nbytes // dist.get_world_size()",
    ),
}  # fmt: skip
_MOVES["ulysses_all_gather_into_tensor_primitive"] = replace(
    _MOVES["allgather"],
    shape="@memory@.world_size * x.shape[0], *x.shape[1:]",
    signature="x: torch.Tensor, group: torch.distributed.ProcessGroup | None = None",
)
_PROBLEMS = tuple(_MOVES)

_COPIERS = {
    "static void @copy@(char* to, const char* from, size_t size) { std::memcpy(to, from, size); }": (
        "Bytes are moved with memcpy.",
    ),
    """\
static void @copy@(char* to, const char* from, size_t size) {
  constexpr size_t kChunk = @chunk@;
  for (size_t at = 0; at < size; at += kChunk) std::memcpy(to + at, from + at, std::min(kChunk, size - at));
}""": ("Copies go in chunks of @chunk@ bytes.",),
    """\
typedef uint64_t Lanes __attribute__((vector_size(@width@), aligned(1), may_alias));

static void @copy@(char* to, const char* from, size_t size) {
  size_t at = 0;
  @unroll@
  for (; at + sizeof(Lanes) <= size; at += sizeof(Lanes))
    *reinterpret_cast<Lanes*>(to + at) = *reinterpret_cast<const Lanes*>(from + at);
  for (; at < size; ++at) to[at] = from[at];
}""": ("Copies use vectors of @width@ bytes, and single bytes for what is left.",),
}  # fmt: skip
_FLAWS = (
    Flaw("wrong rank order", "WRONG_RESULT", {"place": "((@peer@ + 1) % @world@)"}),
    Flaw("wrong slice", "WRONG_RESULT", {"slice": "0"}),
    Flaw("wrong slice", "WRONG_RESULT", {"slice_of_peer": "@me@"}),
    Flaw("elements for bytes", "WRONG_RESULT", {"find_piece": "piece = @argument@.numel()"}),
    Flaw("leaves one rank out", "WRONG_RESULT", {"first": "1"}),
    Flaw("local shape", "WRONG_RESULT", {"shape": "*@argument@.shape"}),
)
_MOVING = ("open", "place", "slice", "slice_of_peer", "root_constant", "first", "find_piece")
"""Slots that what is told of the data's way is about."""
_ROOTED = Flaw("always rank 0", "WRONG_RESULT", {"root_constant": "const int root = 0;"})


def write(choice: Choice, problem: str) -> Sketch:
    """One variant."""
    move, pushed = _MOVES[problem], choice.chance(0.5)
    copier = choice.one(tuple(_COPIERS))
    argument = move.signature.partition(":")[0]
    send, fetch = (move.push_send, move.push_fetch) if pushed else (move.pull_send, move.pull_fetch)
    slots = {"send": send, "fetch": fetch, "copier": copier, "shape": move.shape, "find_piece": f"piece = {move.piece}"}
    slots |= _loops(choice) | {
        "root_parameter": ", size_t rank_of_interest" if move.root else "", "root": f", {move.root}" if move.root else "",
        "root_constant": "const int root = static_cast<int>(rank_of_interest);" if move.root else "",
        "chunk": choice.one(("4096", "16384", "65536", "262144")), "width": choice.one(("16", "32", "64")),
        "unroll": choice.one(("", "#pragma GCC unroll 2", "#pragma GCC unroll 4")),
        "n": choice.one(("bytes", "nbytes", "piece", "chunk")), "place": "@peer@", "slice": "@me@", "slice_of_peer": "@peer@",
    }  # fmt: skip
    names = (problem.partition("_")[0], f"{problem.partition('_')[0]}_bytes", "exchange", "run")
    return program(choice, Kernel(
        native=_NATIVE, function=choice.one(names), pointers=2, numbers=1 + bool(move.root), halves_of=2, body=_BODY,
        signature=move.signature, slots=slots,
        flaws=(*_FLAWS, _ROOTED) if move.root else _FLAWS,
        facts=(fact(_way(choice, pushed=pushed), *_MOVING), *(fact(text) for text in _COPIERS[copier])),
    ), argument)  # fmt: skip


def _loops(choice: Choice) -> dict[str, str]:
    """Over all ranks, and over the others."""
    straight = "for (int @peer@ = @first@; @peer@ < @world@; ++@peer@)"
    turned = "for (int @step@ = @first@, @peer@ = @me@; @step@ < @world@; ++@step@, @peer@ = (@me@ + @step@) % @world@)"
    others = "for (int @step@ = 1, @peer@ = (@me@ + 1) % @world@; @step@ < @world@; ++@step@, @peer@ = (@me@ + @step@) % @world@)"
    return {"each": choice.one((straight, turned)), "others": others, "first": "0"}


def _way(choice: Choice, *, pushed: bool) -> str:
    if pushed:
        return choice.one((
            "Push: senders write straight into the symmetric memory of those who want the data, which then only copy locally.",
            "Data is written into its receiver's symmetric memory, and copied from there to the output after one barrier.",
        ))  # fmt: skip
    return choice.one((
        "Pull: what others need is staged in symmetric memory, and each rank copies what it wants from there.",
        "Ranks stage their data, meet at a barrier, and read the pieces they need from their peers.",
    ))  # fmt: skip


FAMILY = Family("moves in C++", "cpp", _PROBLEMS, write)
