"""The bound of a problem, by hand; the peaks of this machine, measured."""

from __future__ import annotations

from pathlib import Path

import pytest

import problems
from pkb_env.evaluator import Evaluator
from pkb_env.peaks import Peaks, kept, known, measure
from pkb_env.roofline import bound_ms
from pkb_env.submission import Submission
from problems.base import Cost

TIMED = ("allreduce", "allgather", "reducescatter", "gemm_allreduce", "ring_attention", "vocab_parallel_cross_entropy_loss")


@pytest.mark.parametrize(
    ("cost", "milliseconds"),
    [(Cost(2e6, 1e6, 0.0), 2.0), (Cost(1e6, 4e6, 1e3), 4.0), (Cost(1.0, 1.0, 3e8), 30.0), (Cost(0.0, 0.0, 0.0), 0.0)],
)
def test_the_slowest_part_bounds(cost: Cost, milliseconds: float) -> None:
    assert bound_ms(cost, Peaks(bytes_per_s=1e9, flops_per_s=1e10, wire_bytes_per_s=1e9)) == pytest.approx(milliseconds)


def test_the_wire_has_a_rate_of_its_own() -> None:
    assert bound_ms(Cost(1e6, 1e6, 0.0), Peaks(bytes_per_s=1e9, flops_per_s=1.0, wire_bytes_per_s=1e8)) == pytest.approx(10.0)


def test_peaks_are_plausible_and_kept(evaluator: Evaluator, tmp_path: Path) -> None:
    assert kept(tmp_path) is None
    first = known(evaluator.machine().zygote, tmp_path)
    again = known(evaluator.machine().zygote, tmp_path)
    here = measure()
    print(first)
    assert first == again == kept(tmp_path)
    assert 0.1 < first.bytes_per_s / here.bytes_per_s < 10
    assert 0.1 < first.flops_per_s / here.flops_per_s < 10


@pytest.mark.gpu
def test_peaks_of_a_gpu_lie_above_those_of_its_host(evaluator: Evaluator, tmp_path: Path) -> None:
    there, host = (known(evaluator.machine().zygote, tmp_path, where) for where in ("node", "cpu"))
    print(there, host)
    assert there.bytes_per_s > 2 * host.bytes_per_s
    assert there.flops_per_s > 10 * host.flops_per_s


def test_no_reference_beats_its_bound(evaluator: Evaluator) -> None:
    for name in TIMED:
        source = problems.reference_source(problems.load(name))
        verdict = evaluator.evaluate(Submission(source, name))
        print(f"{name}: {verdict.time_ms} ms, bound {verdict.bound_ms} ms")
        assert verdict.correct
        assert verdict.bound_ms is not None
        assert verdict.time_ms is not None
        assert 0 < verdict.bound_ms < verdict.time_ms
