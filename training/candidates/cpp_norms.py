"""RMS norm over columns that are spread over ranks, and the gradients of a layer norm's parameters, each fused with its exchange.

Not here: what is around the kernel (`cpp_program`).
"""

from __future__ import annotations

from training.candidates.choice import Choice
from training.candidates.cpp_program import Kernel, program
from training.candidates.sketch import Fact, Family, Flaw, Sketch, fact

_PROBLEMS = ("tp_rms_norm", "layernorm_backward")
_RMS = """\
constexpr size_t kLanes = @lanes@;

static @real@ sum_of_squares(const float* row, size_t columns) {
  @real@ lane[kLanes] = {}, sum = 0;
  size_t i = 0;
  for (; i + kLanes <= columns; i += kLanes)
    for (size_t k = 0; k < kLanes; ++k) lane[k] += static_cast<@real@>(row[i + k]) * row[i + k];
  for (; i < columns; ++i) sum += static_cast<@real@>(row[i]) * row[i];
  for (size_t k = 0; k < kLanes; ++k) sum += lane[k];
  return sum;
}

extern "C" void @function@(pkb::Group* @group@, const float* @in@, const float* weight, float* @out@, double epsilon, size_t rows,
                           size_t columns@offset_parameter@) {
  const int @me@ = @group@->rank, @world@ = @group@->world@semicolon@
  @real@* own = @group@->buffer<@real@>(@me@)@at@;
  for (size_t row = 0; row < rows; ++row) own[row] = sum_of_squares(@in@ + row * columns, columns);
  @open@
  for (size_t row = 0; row < rows; ++row) {
    @real@ squares = 0;
    for (int @peer@ = 0; @peer@ < @world@; ++@peer@) squares += (@group@->buffer<@real@>(@theirs@)@at@)[row];
    const float scale = static_cast<float>(@scale@);
    const float* from = @in@ + row * columns;
    float* to = @out@ + row * columns;
    for (size_t i = 0; i < columns; ++i) to[i] = @weighted@;
  }
  @close@
@brace@"""
_RMS_BODY = """\
@begin@
x, weight = local_hidden_states.contiguous(), local_weight.contiguous()
rows, columns = x.shape
@memory@ = @workspace@(@bytes@ * rows)
@output@ = @maker@(rows, columns, dtype=x.dtype)
@lib@.@function@(
    @memory@.@group_ptr@, x.data_ptr(), weight.data_ptr(), @output@.@pointer@(), variance_epsilon, rows, columns@offset@
)
@lonely@
return @returned@"""
_GRADIENTS = """\
extern "C" void @function@(pkb::Group* @group@, const float* x_hat, const float* grad, float* gamma, float* beta, size_t rows,
                           size_t columns@offset_parameter@) {
  const int @me@ = @group@->rank, @world@ = @group@->world@semicolon@
  @real@* own = @group@->buffer<@real@>(@me@)@at@;
  std::fill_n(own, 2 * columns, @real@{0});
  for (size_t row = 0; row < rows; ++row) {
    const float *x = x_hat + row * columns, *dy = grad + row * columns;
    @unroll@
    for (size_t i = 0; i < columns; ++i) {
      own[i] += static_cast<@real@>(@gain_term@);
      own[columns + i] += dy[i];
    }
  }
  @open@
  for (size_t i = 0; i < columns; ++i) {
    @real@ gain = 0, bias = 0;
    for (int @peer@ = 0; @peer@ < @world@; ++@peer@) {
      const @real@* sums = @group@->buffer<@real@>(@theirs@)@at@;
      gain += sums[i];
      bias += sums[columns + i];
    }
    gamma[i] = static_cast<float>(gain@mean@);
    beta[i] = static_cast<float>(bias@mean@);
  }
  @close@
@brace@"""
_GRADIENTS_BODY = """\
@begin@
x_hat, grad = X_hat.contiguous(), dY.contiguous()
rows, columns = x_hat.shape
@memory@ = @workspace@(@bytes@ * 2 * columns)
@output@, bias = @maker@(columns, dtype=dY.dtype), @maker@(columns, dtype=dY.dtype)
@lib@.@function@(
    @memory@.@group_ptr@, x_hat.data_ptr(), grad.data_ptr(), @output@.@pointer@(), bias.data_ptr(), rows, columns@offset@
)
@lonely@
return @returned@"""
_OWN_ONLY = Flaw("own sums only", "WRONG_RESULT", {"theirs": "@me@"})
_RMS_FLAWS = (
    _OWN_ONLY,
    Flaw("local width instead of global", "WRONG_RESULT", {"scale": "1.0 / std::sqrt(squares / columns + epsilon)"}),
    Flaw("missing epsilon", "WRONG_RESULT", {"scale": "1.0 / std::sqrt(squares / (double(columns) * @world@))"}),
    Flaw("missing weight", "WRONG_RESULT", {"weighted": "from[i] * scale"}),
    Flaw("root instead of its inverse", "WRONG_RESULT", {"scale": "std::sqrt(squares / (double(columns) * @world@) + epsilon)"}),
)
_GRADIENT_FLAWS = (
    _OWN_ONLY,
    Flaw("mean instead of sum", "WRONG_RESULT", {"mean": " / @world@"}),
    Flaw("square of the wrong factor", "WRONG_RESULT", {"gain_term": "dy[i] * dy[i]"}),
    Flaw("outputs in the wrong order", "WRONG_RESULT", {"returned": "bias, @output@"}),
)


def write(choice: Choice, problem: str) -> Sketch:
    """One variant."""
    real = choice.one(("float", "double"))
    width = {"float": 4, "double": 8}[real]
    slots = {
        "real": real, "bytes": str(width), "theirs": choice.one(("@peer@", "(@me@ + @peer@) % @world@")), "mean": "",
        "lanes": choice.one(("16", "32")), "unroll": choice.one(("", "#pragma GCC ivdep", "#pragma GCC unroll 4")),
        "scale": choice.one(("1.0 / std::sqrt(squares / (double(columns) * @world@) + epsilon)",
                             "1.0 / std::sqrt(squares / static_cast<double>(columns * @world@) + epsilon)")),
        "weighted": choice.one(("weight[i] * (from[i] * scale)", "from[i] * scale * weight[i]")),
        "gain_term": choice.one(("dy[i] * x[i]", "x[i] * dy[i]")) if real == "float" else "static_cast<double>(x[i]) * dy[i]",
    }  # fmt: skip
    if problem == "tp_rms_norm":
        return program(choice, _rms(slots, width, _rms_facts(choice, real)), "local_hidden_states")
    return program(choice, _gradients(slots, width, _facts(choice, real)), "dY")


def _rms(slots: dict[str, str], width: int, facts: tuple[Fact, ...]) -> Kernel:
    return Kernel(
        native=_RMS, function="rms_norm", pointers=3, doubles=1, numbers=2, halves_of=2 * width, body=_RMS_BODY, slots=slots,
        facts=facts,
        signature="local_hidden_states: torch.Tensor, local_weight: torch.Tensor, variance_epsilon: float", flaws=_RMS_FLAWS,
    )  # fmt: skip


def _gradients(slots: dict[str, str], width: int, facts: tuple[Fact, ...]) -> Kernel:
    more = {"returned": "@output@, bias", "returns": "tuple[torch.Tensor, torch.Tensor]"}
    return Kernel(
        native=_GRADIENTS, function="norm_gradients", pointers=4, numbers=2, halves_of=2 * width, body=_GRADIENTS_BODY,
        slots=slots | more, facts=facts, flaws=_GRADIENT_FLAWS, signature="X_hat: torch.Tensor, dY: torch.Tensor",
    )  # fmt: skip


def _rms_facts(choice: Choice, real: str) -> tuple[Fact, ...]:
    return (
        fact(choice.one((
            "Only one sum of squares per row crosses the ranks; normalising and weighting happen in the same pass over the row.",
            "Each rank publishes a sum of squares per row, meets the others, and then normalises its columns in one pass.",
        )), "open", "theirs", "weighted", "scale"),
        fact(f"Squares are accumulated as {real} in @lanes@ lanes, so that the compiler can vectorise the sum."),
    )  # fmt: skip


def _facts(choice: Choice, real: str) -> tuple[Fact, ...]:
    return (
        fact(choice.one((
            "Both gradients come from one pass over the rows, and cross the ranks together.",
            "d_gamma and d_beta are summed locally in one loop, straight into symmetric memory, then over the ranks.",
        )), "open", "theirs", "gain_term", "mean", "returned"),
        fact(f"Sums are kept as {real} until the end."),
    )  # fmt: skip


FAMILY = Family("norms in C++", "cpp", _PROBLEMS, write)
