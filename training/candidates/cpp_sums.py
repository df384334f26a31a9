"""All-reduce and reduce in C++: read from everybody (pull), written to everybody (push), shared out, or passed round (ring).

Every variant is right for any number of ranks and elements.

Not here: how terms are added (`adding`), what is around the kernel (`cpp_program`).
"""

from __future__ import annotations

from collections.abc import Callable

from training.candidates.adding import adder
from training.candidates.choice import Choice
from training.candidates.cpp_program import Kernel, program
from training.candidates.sketch import Fact, Family, Flaw, Sketch, fact

_PROBLEMS = ("allreduce", "reduce")
_NATIVE = """\
@adder@

extern "C" void @function@(pkb::Group* @group@, const float* @in@, float* @out@, size_t @n@@root_parameter@@offset_parameter@) {
  const int @me@ = @group@->rank, @world@ = @group@->world@semicolon@
  @exchange@
  @close@
@brace@"""
_BODY = """\
@begin@
@contiguous@
@find_memory@
@output@ = @maker@(@shape@, dtype=@argument@.dtype)
@lib@.@function@(@memory@.@group_ptr@, @argument@.data_ptr(), @output@.@pointer@(), @argument@.numel()@root@@offset@)
@lonely@
return @returned@"""


def _buffer(rank: str) -> str:
    return f"@group@->buffer<float>({rank})@at@"


_ALL = "for (int @peer@ = 0; @peer@ < @world@; ++@peer@)"
_PULL = f"""\
std::memcpy({_buffer("@me@")}, @in@, @n@ * sizeof(float));
@open@
const float* @parts@[pkb::kMaxWorld];
{_ALL} @parts@[@peer@] = @theirs@;
@result@"""
_PUSH = f"""\
{_ALL}
  if (@peer@ != @me@@only_root@) std::memcpy({_buffer("@peer@")} + @me@ * @n@, @in@, @n@ * sizeof(float));
@open@
const float* @parts@[pkb::kMaxWorld];
{_ALL} @parts@[@peer@] = @peer@ == @me@ ? @in@ : {_buffer("@me@")} + @place@ * @n@;
@result@"""
_TWO_STEPS = f"""\
float* staged = {_buffer("@me@")};
std::memcpy(staged, @in@, @n@ * sizeof(float));
@open@
const float* @parts@[pkb::kMaxWorld];
{_ALL} @parts@[@peer@] = @theirs@;
const pkb::Range share = pkb::share(@n@, @world@, @me@);
@add@(@out@, @parts@, @world@, share.begin, share.end);
std::memcpy(staged + @n@ + share.begin, @out@ + share.begin, share.size() * sizeof(float));
@second_open@
for (int @step@ = 1; @step@ < @world@; ++@step@) {{
  const int @peer@ = (@me@ + @step@) % @world@;
  const pkb::Range theirs = pkb::share(@n@, @world@, @owner@);
  std::memcpy(@out@ + theirs.begin, {_buffer("@peer@")} + @n@ + theirs.begin, theirs.size() * sizeof(float));
}}"""
_RING = f"""\
const int right = (@me@ + 1) % @world@, left = (@me@ + @world@ - 1) % @world@;
const size_t slot = pkb::share(@n@, @world@, 0).end;
std::memcpy(@out@, @in@, @n@ * sizeof(float));
for (int @step@ = 0; @step@ < 2 * (@world@ - 1); ++@step@) {{
  const bool adding = @step@ < @world@ - 1;
  const pkb::Range sent = pkb::share(@n@, @world@, (@me@ - @step@ + 2 * @world@) % @world@);
  const pkb::Range come = pkb::share(@n@, @world@, (@came@ + 2 * @world@) % @world@);
  std::memcpy({_buffer("right")} + @step@ * slot, @out@ + sent.begin, sent.size() * sizeof(float));
  pkb::put_signal(@group@, right, 1);
  @wait@
  const float* piece = {_buffer("@me@")} + @step@ * slot;
  for (size_t i = 0; i < come.size(); ++i) @out@[come.begin + i] = piece[i] + (adding ? @out@[come.begin + i] : 0.0f);
}}"""
_Parts = tuple[dict[str, str], tuple[Fact, ...], tuple[Flaw, ...]]
_LEFT_OUT = frozenset({"open", "theirs", "end", "second", "place"})


def _pull(choice: Choice, problem: str) -> _Parts:
    """Everybody stages its own and reads the others'."""
    first = choice.one((
        "Every rank stages its tensor in symmetric memory; who needs the sum reads what all have staged.",
        "One-shot: stage the own tensor, meet, then add up everybody's where the sum is wanted.",
    ))  # fmt: skip
    rotated = "(@me@ + @peer@) % @world@"
    theirs = choice.one((_buffer("@peer@"), _buffer(rotated)))
    return {"exchange": _PULL, "theirs": theirs, "result": _result(problem)}, (Fact(first, _LEFT_OUT),), (
        Flaw("one rank twice", "WRONG_RESULT", {"theirs": _buffer("@peer@ ? @peer@ : @world@ - 1")}),
    )  # fmt: skip


def _push(choice: Choice, problem: str) -> _Parts:
    """Everybody writes into a slot of its own at the others."""
    first = choice.one((
        "Terms are written into slots of the symmetric memory of whoever adds them; the sum then reads local memory only.",
        "Push: a rank's terms are written straight into the memory of those who add them, one slot for each sender.",
    ))  # fmt: skip
    slots = {
        "exchange": _PUSH, "place": "@peer@", "result": _result(problem), "times_bytes": "dist.get_world_size() * ",
        "only_root": " && @peer@ == static_cast<int>(root)" if problem == "reduce" else "",
    }  # fmt: skip
    return slots, (Fact(first, _LEFT_OUT),), (Flaw("wrong slot", "WRONG_RESULT", {"place": "(@peer@ + 1) % @world@"}),)


def _two_steps(choice: Choice, problem: str) -> _Parts:
    """A share of the sum for each, then everybody collects the others'."""
    assert problem == "allreduce"
    first = choice.one((
        "Two steps: every rank adds up its share of the elements, then collects the others' finished shares.",
        "It is a reduce-scatter followed by an all-gather: each rank sums one share and the shares are then copied.",
    ))  # fmt: skip
    slots = {
        "exchange": _TWO_STEPS, "theirs": _buffer("@peer@"), "times_bytes": "2 * ", "owner": "@peer@",
        "second_open": "pkb::barrier(@group@" + choice.one(("", ", 1")) + ");",
    }  # fmt: skip
    return slots, (Fact(first, _LEFT_OUT | {"second_open", "owner"}),), (
        Flaw("missing second barrier", "WRONG_RESULT", {"second_open": ""}),
        Flaw("own share everywhere", "WRONG_RESULT", {"owner": "@me@"}),
    )  # fmt: skip


def _ring(choice: Choice, problem: str) -> _Parts:
    """Pieces go round, first to be added, then to be known."""
    assert problem == "allreduce"
    first = choice.one((
        "A ring: pieces travel to the right neighbour, added up on the first lap and copied on the second.",
        "Ring all-reduce in 2 * (W - 1) hops, with a slot for each hop so that nothing is overwritten within a call.",
    ))  # fmt: skip
    slots = {
        "exchange": _RING, "came": "@me@ - @step@ - 1", "wait": "pkb::wait_signal(@group@, left, 1);", "adder": "",
        "more_bytes": " + 65536", "times_bytes": "2 * ",
    }  # fmt: skip
    return slots, (fact(first, "came", "wait"),), (
        Flaw("waits for the wrong neighbour's piece", "WRONG_RESULT", {"came": "@me@ - @step@"}),
        Flaw("does not wait for the piece", "WRONG_RESULT", {"wait": ""}),
    )  # fmt: skip


_WAYS: dict[str, tuple[Callable[[Choice, str], _Parts], ...]] = {
    "allreduce": (_pull, _push, _two_steps, _ring),
    "reduce": (_pull, _push),
}


def _result(problem: str) -> str:
    add = "@add@(@out@, @parts@, @world@, 0, @n@);"
    if problem == "allreduce":
        return add
    return f"if (@me@ == @the_root@) {{\n  {add}\n}} else {{\n  std::memcpy(@out@, @in@, @n@ * sizeof(float));\n}}"


def write(choice: Choice, problem: str) -> Sketch:
    """One variant."""
    reduce = problem == "reduce"
    added, added_facts, added_flaws = adder(choice)
    way, facts, flaws = choice.one(_WAYS[problem])(choice, problem)
    common = {
        "root_parameter": ", size_t root" if reduce else "", "root": ", dst" if reduce else "",
        "the_root": "static_cast<int>(root)", "contiguous": "tensor = tensor.contiguous()", "shape": "*tensor.shape",
        "find_memory": "@memory@ = @workspace@(@times_bytes@tensor.nbytes@more_bytes@)", "times_bytes": "", "more_bytes": "",
    }  # fmt: skip
    rooted = (Flaw("always to rank 0", "WRONG_RESULT", {"the_root": "0"}),) if reduce else ()
    ring = "came" in way
    return program(choice, Kernel(
        native=_NATIVE, function=choice.one((problem, f"{problem}_f32", f"run_{problem}")), pointers=2, numbers=1 + reduce,
        halves_of=8, body=_BODY,
        signature="tensor: torch.Tensor, dst: int = 0" if reduce else "tensor: torch.Tensor",
        slots=common | added | way, facts=facts + (() if ring else added_facts),
        flaws=flaws + (() if ring else added_flaws) + rooted,
    ), "tensor")  # fmt: skip


FAMILY = Family("sums in C++", "cpp", _PROBLEMS, write)
