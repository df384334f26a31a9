"""What ranks tell of their kernels: read whatever it is, own ones told from a library's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pkb_env.kernels import own_share, read
from pkb_env.prompt import feedback
from rewards.verdict import Kernel, Status, Verdict

OWN = ("reduce_kernel(float*, int)", "void gather<float>(float*)", "attention_kernel", "triton_like_name", "_two_shot_0d1d")
LIBRARY = (
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "void at::native::vectorized_elementwise_kernel<8>",
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_nn_n", "void cutlass::Kernel2<cutlass_80>",
    "Memcpy DtoD (Device -> Device)", "Memset (Device)", "void c10d::symmetric_memory::two_shot_all_reduce_kernel<8>",
)  # fmt: skip


def told(*rows: list[Any]) -> str:
    return json.dumps(rows)


@pytest.mark.parametrize(("names", "own"), [(OWN, True), (LIBRARY, False)])
def test_own_kernels_are_told_from_those_of_libraries(names: tuple[str, ...], own: bool) -> None:
    kernels = read([told(*([name, 1, 1000.0] for name in names))])
    assert {kernel.name for kernel in kernels} == set(names)
    assert [kernel.own for kernel in kernels] == [own] * len(names)


def test_the_slowest_rank_counts_and_the_longest_come_first() -> None:
    kernels = read([told(["a", 1, 5.0]), told(["b", 2, 3000.0], ["Memset (Device)", 1, 9000.0])])
    assert kernels == (Kernel("Memset (Device)", 1, 9.0, own=False), Kernel("b", 2, 3.0, own=True))
    assert own_share(kernels) == 0.25
    assert own_share(()) is None


@pytest.mark.parametrize("text", [
    "", "no JSON", "[" * 100_000, "{}", "[1, 2]", told(["a", "b", 1.0]), told(["a", True, 1.0]), told(["a", 1, -1.0]),
    told([7, 1, 1.0]),
    '[["a", 1, NaN]]', '[["a", 1, 1e999]]', None, 3,
])  # fmt: skip
def test_what_is_no_kernel_is_left_out(text: Any) -> None:
    assert read([text, told(["real", 1, 1.0])]) == (Kernel("real", 1, 0.001, own=True),)


def test_a_verdict_with_kernels_survives_the_store_and_is_shown() -> None:
    kernels = tuple(Kernel(f"kernel_{i}", i + 1, 4.0 - i, own=True) for i in range(4))
    verdict = Verdict(
        Status.CORRECT, "judge", "", "allreduce", 1, "hardened", "tiny", 1, "cuda", "node", "0" * 64, passed=1.0, kernels=kernels,
        own_kernel_share=1.0,
    )  # fmt: skip
    assert Verdict.from_json(verdict.to_json()) == verdict
    words = feedback(verdict)
    assert "Longest on the GPU: kernel_0 4 ms, kernel_1 3 ms in 2 launches, kernel_2 2 ms in 3 launches." in words
    assert "kernel_3" not in words
