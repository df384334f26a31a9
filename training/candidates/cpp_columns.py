"""Columns gathered from all ranks in C++, before a product (allgather_gemm) or after it (gemm_allgather).

Not here: sums over ranks (`cpp_gemm_sum`), what is around the kernel (`cpp_program`).
"""

from __future__ import annotations

from training.candidates.choice import Choice
from training.candidates.cpp_program import Kernel, program
from training.candidates.sketch import Family, Flaw, Sketch, fact

_PROBLEMS = ("allgather_gemm", "gemm_allgather")
_ROWS_FIRST = """\
for (size_t row = 0; row < @rows@; ++row)
  for (int @peer@ = 0; @peer@ < @world@; ++@peer@)
    std::memcpy(@out@ + (row * @world@ + @place@) * columns, @theirs@ + row * columns, columns * sizeof(float));"""
_RANKS_FIRST = """\
for (int @step@ = 0; @step@ < @world@; ++@step@) {
  const int @peer@ = (@group@->rank + @step@) % @world@;
  const float* block = @theirs@;
  for (size_t row = 0; row < @rows@; ++row)
    @copy_row@
}"""
_COPIES = (
    "std::copy_n(block + row * columns, columns, @out@ + (row * @world@ + @place@) * columns);",
    "std::memcpy(@out@ + (row * @world@ + @place@) * columns, block + row * columns, columns * sizeof(float));",
)
_NATIVE = """\
// Everybody's block of columns side by side.
extern "C" void @function@(pkb::Group* @group@, float* @out@, size_t rows, size_t columns@offset_parameter@) {
  const int @world@ = @group@->world@semicolon@
  @open@
  @gather@
  @close@
@brace@"""
_BEFORE = """\
@begin@
rows, columns = A_local.shape
@memory@ = @workspace@(4 * rows * columns)
@memory@.get_buffer(@memory@.rank, (rows, columns), A_local.dtype@offset@).copy_(A_local)
whole = torch.empty(rows, @memory@.world_size * columns, dtype=A_local.dtype)
@lib@.@function@(@memory@.@group_ptr@, whole.@pointer@(), rows, columns@offset@)
@product@
@lonely@
return @returned@"""
_AFTER = """\
@begin@
rows, columns = A.shape[0], B.shape[1]
@memory@ = @workspace@(4 * rows * columns)
torch.mm(A, B, out=@memory@.get_buffer(@memory@.rank, (rows, columns), A.dtype@offset@))
@output@ = @maker@(rows, @memory@.world_size * columns, dtype=A.dtype)
@lib@.@function@(@memory@.@group_ptr@, @output@.@pointer@(), rows, columns@offset@)
@lonely@
return @returned@"""
_FLAWS = (
    Flaw("wrong rank order", "WRONG_RESULT", {"place": "(@world@ - 1 - @peer@)"}),
    Flaw("last row left out", "WRONG_RESULT", {"rows": "rows - 1"}),
    Flaw("own block only", "WRONG_RESULT", {"theirs": "@group@->buffer<float>(@group@->rank)@at@"}),
    Flaw("product with the local block", "RUNTIME_ERROR", {"product": "@output@ = A_local @matmul@ B"}),
)


def write(choice: Choice, problem: str) -> Sketch:
    """One variant."""
    before, rows_first = problem == "allgather_gemm", choice.chance(0.5)
    own = "@output@ = whole @matmul@ B"
    given = "@output@ = @maker@(rows, B.shape[1], dtype=B.dtype)\ntorch.mm(whole, B, out=@output@)"
    slots = {
        "gather": _ROWS_FIRST if rows_first else _RANKS_FIRST, "copy_row": choice.one(_COPIES), "place": "@peer@", "rows": "rows",
        "theirs": "@group@->buffer<float>(@peer@)@at@", "product": choice.one((own, given)), "matmul": "@",
    }  # fmt: skip
    where = fact(
        "Columns are gathered row by row, over all ranks." if rows_first
        else "Columns are gathered block by block, beginning with the own one.",
        "rows", "theirs", "place", "open",
    )  # fmt: skip
    what = fact(choice.one((
        "A's blocks are staged in symmetric memory, laid side by side in C++, and multiplied with B in one GEMM.",
        "It gathers the whole A first and then multiplies once.",
    )), "theirs", "place", "product", "rows", "open") if before else fact(choice.one((
        "The product is written straight into symmetric memory, and C++ lays everybody's columns side by side.",
        "torch.mm computes the local columns in symmetric memory; each rank then collects all blocks.",
    )), "theirs", "place", "open", "rows")  # fmt: skip
    return program(choice, Kernel(
        native=_NATIVE, function=choice.one(("gather_columns", "join_columns", "side_by_side", "collect")), pointers=1, numbers=2,
        halves_of=8, body=_BEFORE if before else _AFTER, facts=(what, where), flaws=_FLAWS,
        slots=_with_import(slots, before=before),
        signature="A_local: torch.Tensor, B: torch.Tensor" if before else "A: torch.Tensor, B: torch.Tensor",
    ), "A_local" if before else "A")  # fmt: skip


def _with_import(slots: dict[str, str], *, before: bool) -> dict[str, str]:
    """`new_output` is imported only where it is called."""
    unused = before and "@maker@" not in slots["product"]
    return slots | ({"maker_import": ""} if unused else {})


FAMILY = Family("columns gathered in C++", "cpp", _PROBLEMS, write)
