"""GEMM and all-reduce in C++: torch multiplies straight into symmetric memory, C++ adds up, all at once or in blocks.

Not here: how terms are added (`adding`), what is around the kernel (`cpp_program`).
"""

from __future__ import annotations

from training.candidates.adding import adder
from training.candidates.choice import Choice
from training.candidates.cpp_program import Kernel, program
from training.candidates.sketch import Family, Flaw, Sketch, fact

_PROBLEMS = ("gemm_allreduce",)
_NATIVE = """\
@adder@

extern "C" void @function@(pkb::Group* @group@, float* @out@, size_t begin, size_t end@offset_parameter@) {
  const int @world@ = @group@->world@semicolon@
  @open@
  const float* @parts@[pkb::kMaxWorld];
  for (int @peer@ = 0; @peer@ < @world@; ++@peer@) @parts@[@peer@] = @group@->buffer<float>(@theirs@)@at@;
  @add@(@out@, @parts@, @world@, begin, end);
  @close@
@brace@"""
_START = """\
@begin@
rows, columns = A_local.shape[0], B_local.shape[1]
@output@ = @maker@(rows, columns, dtype=A_local.dtype)
@memory@ = @workspace@(4 * rows * columns)
"""
_AT_ONCE = """\
staged = @memory@.get_buffer(@memory@.rank, (rows, columns), A_local.dtype@offset@)
torch.@multiply@
@lib@.@function@(@memory@.@group_ptr@, @output@.@pointer@(), 0, rows * columns@offset@)
"""
_BLOCKS = """\
staged = @memory@.get_buffer(@memory@.rank, (rows, columns), A_local.dtype@offset@)
for first in range(0, rows, @rows_of_block@):
    last = min(first + @rows_of_block@, rows)
    torch.mm(A_local[first:last], B_local, out=staged[first:last])
    @lib@.@function@(@memory@.@group_ptr@, @output@.@pointer@(), first * columns, last * columns@offset@)
"""
_END = "@lonely@\nreturn @returned@"
_FLAWS = (
    Flaw("own product only", "WRONG_RESULT", {"theirs": "@group@->rank"}),
    Flaw("product into the output", "WRONG_RESULT", {"multiply": "mm(A_local, B_local, out=@output@)"}),
    Flaw("transposed operand", "RUNTIME_ERROR", {"multiply": "mm(A_local, B_local.T, out=staged)"}),
)


def write(choice: Choice, problem: str) -> Sketch:  # noqa: ARG001  there is one problem
    """One variant."""
    blocks = choice.chance(0.4)
    added, facts, flaws = adder(choice)
    rows = choice.one(("32", "64", "128"))
    way = fact(choice.one((
        f"The product is computed in blocks of {rows} rows, and each block is summed over the ranks as soon as it is there.",
        f"{rows} rows at a time: multiply, meet, add up.",
    )), "open", "theirs", "rows_of_block") if blocks else fact(choice.one((
        "torch.mm writes the local product straight into symmetric memory, and every rank adds up all of them.",
        "The local GEMM's output buffer is the symmetric memory itself, so nothing is staged by copying.",
    )), "multiply", "open", "theirs")  # fmt: skip
    slots = added | {
        "theirs": choice.one(("@peer@", "(@group@->rank + @peer@) % @world@")), "rows_of_block": rows,
        "multiply": choice.one(("mm(A_local, B_local, out=staged)", "matmul(A_local, B_local, out=staged)")),
    }  # fmt: skip
    return program(choice, Kernel(
        native=_NATIVE, function=choice.one(("sum_products", "add_products", "reduce_products", "combine")),
        pointers=1, numbers=2, halves_of=8, body=_START + (_BLOCKS if blocks else _AT_ONCE) + _END,
        signature="A_local: torch.Tensor, B_local: torch.Tensor",
        slots=slots, facts=(way, *facts), flaws=(*_FLAWS, *flaws),
    ), "A_local")  # fmt: skip


FAMILY = Family("products summed in C++", "cpp", _PROBLEMS, write)
