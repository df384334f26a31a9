"""One contract for every problem: it honours its own answer and refuses every lazy one, on real ranks."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import pytest
import torch
from meaningless import MEANINGLESS
from trials import possible, same, tried

import problems
from pkb_env import lazy
from pkb_env.judge import compare, public_rule, summarise
from pkb_env.trial import make
from pkb_env.unboxed import run_source
from problems.base import PROFILES

NAMES = problems.names()
WORLDS = (2, 4)
COMPUTING = ("gemm_allreduce", "ring_attention", "vocab_parallel_cross_entropy_loss")


def test_few_cells_of_the_contract_mean_nothing() -> None:
    assert len(MEANINGLESS) <= 10
    assert {slug for slug, _ in MEANINGLESS} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_contract_fields(name: str) -> None:
    problem = problems.load(name)
    assert problem.slug == name
    assert {size.name for size in problem.sizes.values()} == set(problem.sizes)
    assert set(problem.mutates) <= set(problem.arguments)
    assert len(make(problem, 2)[0]) == len(problem.arguments)
    for world_size in [w for w in (1, 2, 8) if not problem.valid_world(w)]:
        costs = [problem.cost(size, world_size, 4) for size in problem.sizes.values()]
        assert all(c.memory_bytes > 0 and c.flops >= 0 and (c.wire_bytes > 0) is (world_size > 1) for c in costs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("profile", PROFILES)
def test_inputs_follow_the_seed_and_nothing_else(name: str, profile: str) -> None:
    problem = problems.load(name)
    possible(problem, 4)
    first = make(problem, 4, profile=profile)
    state = torch.get_rng_state()
    assert same(first, make(problem, 4, profile=profile))
    assert torch.equal(state, torch.get_rng_state())
    assert not any(same(first[0], other) for other in first[1:])
    if profile == "hardened":
        assert not same(first, make(problem, 4, trial=1))
        assert not same(first, make(problem, 4, secret=b"t"))


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_is_honoured(name: str) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        inputs = make(problems.load(name), 2, dtype=dtype)
        assert all(x.dtype == dtype for args in inputs for x in args if isinstance(x, torch.Tensor) and x.is_floating_point())


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", NAMES)
def test_reference_and_a_more_precise_answer_are_correct(name: str, world_size: int) -> None:
    trial = tried(name, world_size)
    for answer in ([run.output for run in trial.runs], lazy.honest_answer(trial.problem, trial.inputs)):
        assert trial.summary(answer).message == ""


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_reference_runs_on_odd_worlds_too(name: str, world_size: int) -> None:
    trial = tried(name, world_size)
    assert trial.summary([run.output for run in trial.runs]).message == ""


@pytest.mark.parametrize("name", NAMES)
def test_reference_lies_within_the_floor_of_its_dtype(name: str) -> None:
    """Judged with a perfect reference's budget, so that a wrong formula cannot vouch for itself."""
    trial = tried(name, 4)
    perfect = lazy.honest_answer(trial.problem, trial.inputs)
    found = compare(trial.problem, trial=0, exact=trial.exact, reference=perfect, candidate=[run.output for run in trial.runs])
    assert summarise(found, 4).message == ""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_runs_and_half_of_it_is_refused(name: str, dtype: torch.dtype) -> None:
    trial = tried(name, 2, dtype=dtype)
    assert trial.summary([run.output for run in trial.runs]).message == ""
    assert trial.summary(lazy.honest_answer(trial.problem, trial.inputs)).message == ""
    if (name, "float8 inside") not in MEANINGLESS:
        assert trial.summary(lazy.rounded_answer(trial.problem, trial.inputs, torch.float8_e4m3fn)).passed < 1


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", NAMES)
def test_arguments_change_exactly_as_declared(name: str, world_size: int) -> None:
    trial = tried(name, world_size)
    after = [run.args for run in trial.runs]
    assert not [str(c) for c in trial.judge_arguments(after) if not c.passed]
    assert {c.argument for c in trial.judge_arguments(trial.inputs) if not c.passed} == set(trial.problem.mutates)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", NAMES)
def test_lazy_answers_are_refused(name: str, world_size: int) -> None:
    trial = tried(name, world_size)
    before = [tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in args) for args in trial.inputs]
    answers = lazy.lazy_answers(trial.problem, trial.inputs, trial.other_inputs)
    assert len(answers) == 9
    assert same(before, trial.inputs)
    for answer, outputs in answers.items():
        summary = trial.summary(outputs)
        print(f"{answer}: {summary.message}")
        assert summary.passed < 1 or (name, answer) in MEANINGLESS, f"{answer} was accepted"


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", COMPUTING)
def test_bf16_inside_is_refused(name: str, world_size: int) -> None:
    trial = tried(name, world_size)
    assert trial.summary(lazy.rounded_answer(trial.problem, trial.inputs, torch.bfloat16)).passed == 0


def test_pieces_without_elements_have_lazy_answers_too() -> None:
    """Of a problem whose ranks may have nothing to give: integers, and a first argument that is empty."""
    some = problems.load("allreduce")
    empty = replace(some, reference=lambda x, n: n[: len(x)], exact=lambda inputs: [n[:0] for _, n in inputs])
    inputs: list[tuple[Any, ...]] = [(torch.empty(0), torch.ones(3, dtype=torch.int64))] * 2
    for outputs in lazy.lazy_answers(empty, inputs, inputs).values():
        assert [out.numel() for out in outputs] == [0, 0]
    filled = replace(empty, reference=lambda x, n: n + len(x), exact=lambda inputs: [n for _, n in inputs])
    assert same(lazy.lazy_answers(filled, inputs, inputs)["first input"], [torch.zeros(3, dtype=torch.int64)] * 2)


def sum_backwards(inputs: list[Any]) -> torch.Tensor:
    total: torch.Tensor = inputs[-1][0].clone()
    for (tensor,) in inputs[-2::-1]:
        total += tensor
    return total


def product_term_by_term(inputs: list[Any]) -> torch.Tensor:
    total = torch.zeros(len(inputs[0][0]), inputs[0][1].shape[1])
    for a, b in inputs:
        for k in range(a.shape[1]):
            total.addcmul_(a[:, k : k + 1], b[k : k + 1])
    return total


def fused_attention(inputs: list[Any]) -> list[torch.Tensor]:
    q, k, v = (torch.cat([args[i] for args in inputs], dim=1).transpose(1, 2) for i in range(3))
    scale, causal = inputs[0][3:5]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    return [part.contiguous() for part in out.transpose(1, 2).chunk(len(inputs), dim=1)]


def fused_loss(inputs: list[Any]) -> torch.Tensor:
    logits = torch.cat([args[0] for args in inputs], dim=-1)
    target: torch.Tensor = inputs[0][1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)


OTHER_KERNELS: dict[str, Callable[[list[Any]], list[torch.Tensor]]] = {
    "allreduce": lambda inputs: [sum_backwards(inputs)] * len(inputs),
    "reducescatter": lambda inputs: list(sum_backwards(inputs).chunk(len(inputs))),
    "gemm_allreduce": lambda inputs: [product_term_by_term(inputs)] * len(inputs),
    "ring_attention": fused_attention,
    "vocab_parallel_cross_entropy_loss": lambda inputs: [fused_loss(inputs)] * len(inputs),
}


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", OTHER_KERNELS)
def test_another_order_of_the_same_work_is_correct(name: str, world_size: int) -> None:
    for size in ("tiny", "odd"):
        trial = tried(name, world_size, size)
        assert trial.summary(OTHER_KERNELS[name](trial.inputs)).message == ""


@pytest.mark.parametrize("name", NAMES)
def test_reference_source_is_a_candidate(name: str) -> None:
    trial = tried(name, 2)
    source = problems.reference_source(trial.problem)
    ours = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
    assert not [node.module for node in ours if (node.module or "").startswith(("problems", "pkb_env"))]
    assert source.count("def solution(") == 1
    runs = run_source(source, trial.inputs)
    assert same([run.output for run in runs], [run.output for run in trial.runs])
    assert same([run.args for run in runs], [run.args for run in trial.runs])


@pytest.mark.parametrize("name", NAMES)
def test_silenced_source_runs_on_real_ranks_and_is_refused(name: str) -> None:
    trial = tried(name, 2)
    outputs = [run.output for run in run_source(lazy.silenced_source(trial.problem), trial.inputs)]
    assert same(outputs, lazy.silenced_answer(trial.problem, trial.inputs))
    assert trial.summary(outputs).passed < 1


@pytest.mark.parametrize("name", ["allreduce", "allgather", "reducescatter"])
def test_upstream_profile_can_be_guessed_from_the_rank(name: str) -> None:
    """Why `hardened` is the default: the public inputs of these problems depend on the rank alone."""
    problem = problems.load(name)
    inputs = make(problem, 2, size="upstream", profile="upstream")
    guess = lazy.lazy_answers(problem, inputs, inputs)["rank only"]
    assert public_rule([x.to(g.dtype) for x, g in zip(problem.exact(inputs), guess, strict=True)], guess)


def test_attention_tries_both_masks_and_both_scales() -> None:
    tries = [make(problems.load(54), 2, trial=trial)[0] for trial in range(4)]
    assert len({(scale is None, causal) for *_, scale, causal, _ in tries}) == 4


def test_attention_over_a_sub_group_talks_to_the_right_peers() -> None:
    inputs = make(problems.load(54), 2)
    wrapped = problems.reference_source(problems.load(54)).replace("def solution(", "def inner(") + SUB_GROUP
    runs = run_source(wrapped, [inputs[0], *inputs, inputs[0]])
    expected = tried("ring_attention", 2)
    assert same([runs[1].output, runs[2].output], [run.output for run in expected.runs])


SUB_GROUP = """

def solution(q, k, v, softmax_scale, causal, group):
    group = dist.new_group([1, 2])
    return inner(q, k, v, softmax_scale, causal, group) if dist.get_rank() in (1, 2) else q
"""


@pytest.mark.parametrize("name", NAMES)
def test_default_size_is_correct_and_quickly_judged(name: str) -> None:
    trial = tried(name, 4, "default")
    answer = [run.output for run in trial.runs]
    assert trial.summary(answer).message == ""
    started = perf_counter()
    trial.judge(answer)
    trial.judge_arguments([run.args for run in trial.runs])
    assert perf_counter() - started < 1, "an idle machine needs well under 0.1 s for a trial"
