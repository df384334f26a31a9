"""All-gather, broadcast, scatter, gather and all-to-all in PyTorch: read where staged, or written where wanted.

Not here: sums (`torch_sums`), what is around the work (`torch_program`).
"""

from __future__ import annotations

from dataclasses import dataclass

from training.candidates.choice import Choice
from training.candidates.sketch import Family, Flaw, Sketch, fact
from training.candidates.torch_program import Work, program

_BODY = """\
tensor = tensor.contiguous()
rank, ranks = dist.get_rank(), dist.get_world_size()
@find_shape@
numbers = @numbers@
@memory@ = @workspace@(@all_pieces@numbers * tensor.itemsize)
@slots@
@send@
@open@
@fetch@
@close@
@lonely@
return @returned@"""
_SLOTS = "slots = [@memory@.@method@(r, (ranks, *shape), tensor.dtype) for r in range(ranks)]"
_MAKE = "@output@ = @maker@(@shape@, dtype=tensor.dtype)"
_OTHERS = "for other in range(ranks):"


@dataclass(frozen=True)
class Move:
    """`slots[r]` is the memory of rank r, with one piece for every rank."""

    pull_send: str
    pull_fetch: str
    push_send: str
    push_fetch: str
    find_shape: str = "shape = tensor.shape"
    root: str = ""


_ROOT_STACKS = """\
if rank == @root@:
    @output@ = @maker@(ranks, *shape, dtype=tensor.dtype)
    for other in range(ranks):
        @output@[@place@] = {source}
else:
    @output@ = tensor.clone()"""
_MOVES = {
    "allgather": Move(
        "slots[rank][0] = tensor", f"{_MAKE}\n{_OTHERS}\n    @output@[@place@] = slots[other][0]",
        f"{_OTHERS}\n    slots[other][rank] = tensor", f"{_MAKE}\n@output@.copy_(slots[rank])",
    ),
    "broadcast": Move(
        "if rank == @root@:\n    slots[rank][0] = tensor", f"{_MAKE}\n@output@.copy_(slots[@root@][0])",
        f"if rank == @root@:\n    {_OTHERS}\n        slots[other][0] = tensor", f"{_MAKE}\n@output@.copy_(slots[rank][0])",
        root="src",
    ),
    "scatter": Move(
        "if rank == @root@:\n    slots[rank].copy_(tensor)", f"{_MAKE}\n@output@.copy_(slots[@root@][@slice@])",
        f"if rank == @root@:\n    {_OTHERS}\n        slots[other][0] = tensor[@slice_of_other@]",
        f"{_MAKE}\n@output@.copy_(slots[rank][0])",
        find_shape="shape = tensor.shape[1:] if rank == @root@ else tensor.shape", root="src",
    ),
    "gather": Move(
        "slots[rank][0] = tensor", _ROOT_STACKS.format(source="slots[other][0]"),
        "slots[@root@][rank] = tensor", _ROOT_STACKS.format(source="slots[rank][other]"), root="dst",
    ),
    "alltoall": Move(
        "slots[rank].copy_(tensor.view(ranks, *shape))",
        f"{_MAKE}\n{_OTHERS}\n    @output@.view(ranks, *shape)[@place@] = slots[other][@slice@]",
        f"{_OTHERS}\n    slots[other][rank] = tensor.view(ranks, *shape)[@slice_of_other@]",
        f"{_MAKE}\n@output@.view(ranks, *shape).copy_(slots[rank])",
        find_shape="shape = (tensor.shape[0] // ranks, *tensor.shape[1:])",
    ),
}  # fmt: skip
_PROBLEMS = tuple(_MOVES)
_COUNTS = ("shape.numel()", "torch.Size(shape).numel()")
_SHAPES = {"allgather": "ranks, *shape", "alltoall": "*tensor.shape"}
_FLAWS = (
    Flaw("wrong rank order", "WRONG_RESULT", {"place": "ranks - 1 - other"}),
    Flaw("wrong slice", "WRONG_RESULT", {"slice": "0"}),
    Flaw("wrong slice", "WRONG_RESULT", {"slice_of_other": "rank"}),
    Flaw("local shape", "WRONG_RESULT", {"returned": "@output@[0]"}),
    Flaw("local size instead of global", "RUNTIME_ERROR", {"all_pieces": ""}),
)


def write(choice: Choice, problem: str) -> Sketch:
    """One variant."""
    move, pushed = _MOVES[problem], choice.chance(0.5)
    send, fetch = (move.push_send, move.push_fetch) if pushed else (move.pull_send, move.pull_fetch)
    slots = {
        "send": send, "fetch": fetch, "find_shape": move.find_shape, "slots": _SLOTS, "shape": _SHAPES.get(problem, "*shape"),
        "numbers": choice.one(_COUNTS[("(" in move.find_shape) :]),
        "root": move.root, "all_pieces": "ranks * ", "place": "other", "slice": "rank", "slice_of_other": "other",
    }  # fmt: skip
    told = (
        "Push: senders copy straight into their receivers' symmetric memory, and receivers read only their own.",
        "Every piece is written into its receiver's symmetric memory, then copied out locally.",
    ) if pushed else (
        "Pull: pieces are staged in symmetric memory and read from there by whoever wants them.",
        "After a barrier each rank copies the pieces it needs out of its peers' memory.",
    )  # fmt: skip
    rooted = (Flaw("always rank 0", "WRONG_RESULT", {"root": "0"}),) if move.root else ()
    signature = "tensor: torch.Tensor" + (f", {move.root}: int = 0" if move.root else "")
    facts = (fact(choice.one(told), "open", "place", "slice", "slice_of_other", "root"),)
    return program(choice, Work(_BODY, signature, slots, facts, (*_FLAWS, *rooted)), "tensor")


FAMILY = Family("moves in PyTorch", "torch", _PROBLEMS, write)
