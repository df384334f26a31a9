"""Inputs on which typical mistakes show: what a second hand missed once, problem by problem.

Not here: the contract that holds for all problems (`test_problems`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import problems
from pkb_env.trial import make, tried
from problems.fp8 import fp8_round_trip
from problems.fp8_cases import exact_delayed

SECRETS = [bytes([i]) * 8 for i in range(6)]


def inputs(name: str, world_size: int, trials: int, **more: Any) -> list[list[tuple[Any, ...]]]:
    """Of so many trials, all ranks' arguments."""
    return [make(problems.load(name), world_size, trial=trial, **more) for trial in range(trials)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_keys_to_sort_do_not_divide_by_the_ranks(world_size: int) -> None:
    totals = [sum(len(args[0]) for args in ranks) for ranks in inputs("distributed_sample_sort", world_size, 8)]
    assert {total % world_size for total in totals} - {0}


def test_objects_overlap_in_chains() -> None:
    """A overlaps B and B overlaps C, but not A and C: who suppresses one after the other is found out."""
    chains = 0
    for ranks in inputs("sam3_allgather_iou_suppression", 3, 8):
        masks = (torch.cat([args[0] for args in ranks]) > 0).flatten(1).double()
        both, areas = masks @ masks.T, masks.sum(1)
        overlap = both / (areas[:, None] + areas - both) >= ranks[0][4]
        chains += bool(((overlap.double() @ overlap.double() > 0) & ~overlap).any())
    assert chains > 1


def test_some_rank_has_no_objects() -> None:
    assert any(0 in ranks[0][2] for ranks in inputs("sam3_allgather_iou_suppression", 3, 3))


def test_one_axis_of_a_transform_is_cropped_and_the_other_padded() -> None:
    changed = 0
    for ranks in inputs("physicsnemo_distributed_rfft", 2, 4):
        x, s, dim = ranks[0][:3]
        extents = [x.shape[dim[0]], 2 * x.shape[dim[1]]]
        changed += all(n is not None and n != extent for n, extent in zip(s, extents, strict=True))
    assert changed == 1


def test_a_field_has_an_odd_number_of_columns() -> None:
    assert {ranks[0][1][1] % 2 for ranks in inputs("physicsnemo_distributed_irfft", 3, 4)} == {1}


@pytest.mark.parametrize("secret", SECRETS, ids=lambda secret: secret[:1].hex())
@pytest.mark.parametrize(
    ("name", "place"), [("ulysses_gather_seq_scatter_heads", 4), ("ulysses_gather_seq_scatter_heads_qkv", 3)]
)
def test_two_ranks_meet_padding_within_a_few_trials(name: str, place: int, secret: bytes) -> None:
    lengths = [ranks[0][place] for ranks in inputs(name, 2, 4, secret=secret)]
    assert any(length and length % 2 for length in lengths), lengths


def test_a_history_is_rounded_to_its_own_type() -> None:
    """The scale follows from what is kept, also where gradients have more digits: else leaving fp8 out would pass."""
    x, history = make(problems.load("fp8_reduce_scatter_grads"), 2, size="upstream", profile="upstream")[0]
    ours, theirs = fp8_round_trip(x, history), exact_delayed(x, history)
    assert torch.allclose(ours[0].double(), theirs[0], rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_public_inputs_of_quantising_are_answered_in_float32(dtype: torch.dtype) -> None:
    found = tried(problems.load("blocked_fp8_quantize"), 2, size="upstream", profile="upstream", dtype=dtype)
    assert found.summary(found.outputs).message == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_log_sum_exp_keeps_its_digits(dtype: torch.dtype) -> None:
    for profile in ("hardened", "upstream"):
        lse = make(problems.load("ring_attention_backward_dp"), 2, dtype=dtype, profile=profile)[0][5]
        assert lse.dtype == torch.promote_types(dtype, torch.float32)


def test_the_least_ratio_is_not_always_the_clamp() -> None:
    problem = problems.load("importance_sampling_loss")
    least = [float(problem.exact(ranks)[0][4][1]) for ranks in inputs("importance_sampling_loss", 2, 4)]
    assert sum(ratio > 0.01 for ratio in least) == 2


def test_a_loss_of_no_tokens_is_infinite_or_nan() -> None:
    losses = [float(args[0]) for ranks in inputs("grad_acc_loss", 2, 4) for args in ranks if not args[1]]
    assert len(losses) == 3
    assert {str(abs(loss)) for loss in losses} == {"inf", "nan"}


@pytest.mark.parametrize(
    ("name", "size", "world_size", "most"),
    [
        ("tp_muon_orthogonalization", "default", 4, lambda s, w: (w - 1) * s["R"] * s["C"] / w * 2),
        ("opensora_conv3d_allreduce", "large", 2, lambda s, w: (w - 1) * (
            s["B"] * s["I"] * s["T"] * s["Y"] * s["X"] + s["O"] * s["I"] * s["k"] ** 3) * 2),
        ("gsplat_3d_gaussian_splatting", "odd", 8, lambda s, w: (w - 1) * s["n"] * (11 + s["D"]) * 2),
        ("quantized_grad_allreduce", "default", 2, lambda s, w: (w - 1) * s["P"] * (1 + 4 / 256)),
        ("fsdp_and_tp", "default", 4, lambda s, w: 2 * (w - 1) / w * s["R"] * -(-s["D"] // w) * w * 2),
        ("ring_attention_backward_dp", "default", 2, lambda s, w: (w - 1) * s["B"] * s["T"] / w * s["H"] * (4 * s["D"] + 4)),
    ],
)  # fmt: skip
def test_a_floor_is_no_higher_than_what_some_algorithm_sends(name: str, size: str, world_size: int, most: Any) -> None:
    problem = problems.load(name)
    extents = problem.sizes[size]
    assert problem.cost(extents, world_size, 2).wire_bytes <= most(extents, world_size) * 1.0001
