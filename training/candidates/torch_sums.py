"""All-reduce, reduce and GEMM with all-reduce in PyTorch: over symmetric memory at once or by shares, or over a gather.

Not here: what is around the work (`torch_program`).
"""

from __future__ import annotations

from training.candidates.choice import Choice
from training.candidates.sketch import Family, Flaw, Sketch, fact
from training.candidates.torch_program import Work, program

_PROBLEMS = ("allreduce", "reduce", "gemm_allreduce")
_TERM = {
    "allreduce": "@term@ = tensor.contiguous()",
    "reduce": "@term@ = tensor.contiguous()",
    "gemm_allreduce": "@term@ = A_local @matmul@ B_local",
}
_SIGNATURES = {
    "allreduce": "tensor: torch.Tensor",
    "reduce": "tensor: torch.Tensor, dst: int = 0",
    "gemm_allreduce": "A_local: torch.Tensor, B_local: torch.Tensor",
}
_STAGED = """\
@own_term@
@memory@ = @workspace@(@term@.nbytes)
views = [@memory@.@method@(r, @term@.shape, @term@.dtype) for r in range(@count@)]
views[@memory@.rank].copy_(@term@)
@open@
@total@
@close@
@lonely@
return @returned@"""
_SHARES = """\
@own_term@
@memory@ = @workspace@(2 * @term@.nbytes)
size, rank = @term@.numel(), @memory@.rank
bounds = [size * r // @memory@.world_size for r in range(@memory@.world_size + 1)]
first, last = bounds[rank], @last@
@memory@.@method@(rank, (size,), @term@.dtype).copy_(@term@.flatten())
@open@
share = @memory@.@method@(rank, (size,), @term@.dtype, size)[first:last]
share.copy_(@memory@.@method@(0, (size,), @term@.dtype)[first:last])
for r in range(1, @count@):
    share.add_(@memory@.@method@(r, (size,), @term@.dtype)[first:last])
@between@
@output@ = @maker@(*@term@.shape, dtype=@term@.dtype)
flat = @output@.view(-1)
for r in range(@memory@.world_size):
    flat[bounds[r]:bounds[r + 1]] = @memory@.@method@(r, (size,), @term@.dtype, size)[bounds[r]:bounds[r + 1]]
@close@
@lonely@
return @returned@"""
_GATHERED = """\
@own_term@
gathered = [torch.empty_like(@term@) for _ in range(dist.get_world_size())]
dist.all_gather(gathered, @term@)
@total@
@lonely@
return @returned@"""
_STACK = "@output@ = torch.stack(@terms@).@reduced@(0)"
_LOOP = "@output@ = @terms@[0].clone()\nfor other in @terms@[1:]:\n    @output@ += other"
_INTO = """\
@output@ = @maker@(*@term@.shape, dtype=@term@.dtype)
torch.add(@terms@[0], @terms@[1], out=@output@) if len(@terms@) > 1 else @output@.copy_(@terms@[0])
for other in @terms@[2:]:
    @output@.add_(other)"""
_DOUBLE = "@output@ = sum(other.double() for other in @terms@).to(@term@.dtype)"
_TOTALS = {
    _STACK: "All terms are stacked and summed in one call.",
    _LOOP: "Terms are added one after another into a copy of the first.",
    _INTO: "The first two terms are added into the output, which saves a pass over it.",
    _DOUBLE: "Terms are added in double and rounded once.",
}
_FLAWS = (
    Flaw("mean instead of sum", "WRONG_RESULT", {"reduced": "mean"}),
    Flaw("leaves one rank out", "WRONG_RESULT", {"count": "@memory@.world_size - 1"}),
    Flaw("missing second barrier", "WRONG_RESULT", {"between": ""}),
    Flaw("off by one at the end", "WRONG_RESULT", {"last": "bounds[rank + 1] - 1"}),
    Flaw("rank 0 only", "WRONG_RESULT", {"root": "0"}),
)
_TRANSPOSED = Flaw("transposed operand", "RUNTIME_ERROR", {"own_term": "@term@ = A_local @matmul@ B_local.T"})


def write(choice: Choice, problem: str) -> Sketch:
    """One variant."""
    ways = {_STAGED: "views", _GATHERED: "gathered"} | ({} if problem == "reduce" else {_SHARES: ""})
    body = choice.one(tuple(ways))
    total = choice.one(tuple(_TOTALS))
    slots = {
        "term": choice.one(("own", "local", "mine", "staged")), "own_term": _TERM[problem], "matmul": "@", "terms": ways[body],
        "reduced": "sum", "count": "@memory@.world_size", "last": "bounds[rank + 1]", "root": "dst",
        "between": "@memory@.barrier()" + choice.one(("", "  # all shares are finished")),
        "total": total if problem != "reduce" else _only_root(total),
    }  # fmt: skip
    facts = [fact(_told(choice, body), "open", "between", "count", "last")]
    if body != _SHARES:
        facts.append(fact(_TOTALS[total], "reduced", "count", "root"))
    argument, flaws = ("A_local", (*_FLAWS, _TRANSPOSED)) if problem == "gemm_allreduce" else ("tensor", _FLAWS)
    return program(choice, Work(body, _SIGNATURES[problem], slots, tuple(facts), flaws, symmetric=body != _GATHERED), argument)


def _only_root(total: str) -> str:
    inner = total.replace("\n", "\n    ")
    return f"if dist.get_rank() == @root@:\n    {inner}\nelse:\n    @output@ = tensor.clone()"


def _told(choice: Choice, body: str) -> str:
    return choice.one({
        _STAGED: ("Terms are staged in symmetric memory; after a barrier they are read and added up where the sum is wanted.",
                  "One step: stage, meet, add up everybody's."),
        _SHARES: ("Every rank sums one share of the elements, and all shares are collected after a second barrier.",
                  "Reduce-scatter and all-gather over symmetric memory, so that each element is summed once."),
        _GATHERED: ("An all_gather brings all terms, and the sum is local.",
                    "It gathers the terms from all ranks and adds them up itself."),
    }[body])  # fmt: skip


FAMILY = Family("sums in PyTorch", "torch", _PROBLEMS, write)
