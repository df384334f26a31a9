"""`pkb doctor` about GPUs: one line where there is none, and each wall tried in a box with a GPU where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pkb_env import gpu_health, topology
from pkb_env.config import EvalConfig
from pkb_env.doctor import examine
from pkb_env.torch_extension import torch_version
from pkb_env.wall_health import STOPS

TWO_GPUS = """\
case "$1" in
  -L) echo "GPU 0: NVIDIA H200 (UUID: GPU-1)"; echo "GPU 1: NVIDIA H200 (UUID: GPU-2)" ;;
  *) echo 580.65; echo 580.65 ;;
esac"""


def driver(folder: Path, patch: pytest.MonkeyPatch, answers: str) -> None:
    """An nvidia-smi that is found first; no GPU can be had without a driver."""
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{answers}\n", encoding="utf-8")
    (folder / "nvidia-smi").chmod(0o755)
    patch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(topology, "gpus", lambda: 0)
    return monkeypatch


def test_without_a_gpu_there_is_one_line(no_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_gpu.setenv("PATH", str(tmp_path))
    assert gpu_health.topologies() == ()
    assert gpu_health.facts() == {"GPUs": "none (no NVIDIA driver); topology auto is cpu"}


def test_a_driver_that_fails_is_quoted(no_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver(tmp_path, no_gpu, "echo Driver/library version mismatch >&2; exit 18")
    assert gpu_health.facts() == {"GPUs": "none (nvidia-smi: Driver/library version mismatch); topology auto is cpu"}


def test_gpus_beside_a_torch_without_cuda_say_what_to_install(no_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver(tmp_path, no_gpu, TWO_GPUS)
    no_gpu.setattr("torch.version.cuda", None)
    line = gpu_health.facts()["GPUs"]
    assert line.startswith(f"2 that cannot be used: torch {torch_version()} is built without CUDA; install")


def test_with_a_gpu_the_choice_of_auto_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver(tmp_path, monkeypatch, TWO_GPUS)
    monkeypatch.setattr(topology, "gpus", lambda: 1)
    monkeypatch.setattr(topology, "gpu_name", lambda: "NVIDIA H200 x1")
    found = gpu_health.facts()
    assert gpu_health.topologies() == ("node", "shared")
    assert (found["GPUs"], found["driver"]) == ("NVIDIA H200 x1", "580.65")
    one, two = (topology.choose(ranks) for ranks in (1, 2))
    assert (one[0], two[0]) == ("node", "shared")
    assert found["auto"] == f"node ({one[1]}), shared ({two[1]})"
    assert found["nvcc"].startswith("nvcc ") or "CUDA_HOME" in found["nvcc"]
    assert found["triton"].startswith("triton ") or "pip install triton" in found["triton"]


def test_a_missing_nvcc_comes_with_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver(tmp_path, monkeypatch, TWO_GPUS)
    monkeypatch.setattr(topology, "gpus", lambda: 2)
    monkeypatch.setattr("pkb_env.cuda_toolchain._places", lambda: iter(()))
    assert "pip install 'nvidia-cuda-nvcc==13.0.*'" in gpu_health.facts()["nvcc"]


def test_a_gpu_that_does_not_work_is_named_and_the_cpu_is_examined_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    there = topology.devices
    monkeypatch.setattr(topology, "gpus", lambda: 1)
    monkeypatch.setattr(topology, "devices", lambda name, ranks: there(name, ranks) and [99] * ranks)  # nobody has so many
    health = examine(EvalConfig(retries=0))
    assert not health.works
    assert health.trouble.startswith("a known-good candidate came out as INFRA on node: ")
    assert "INFRA on shared: " in health.trouble
    assert "the makers of inputs did not start: " in health.trouble
    assert "cuda" in health.trouble.lower()
    assert health.facts["allreduce on node"].startswith("INFRA in ")
    assert health.facts["allreduce on cpu"].startswith("CORRECT in ")
    assert {each.topology for each in health.tries} == {"cpu"}


def test_on_the_cpu_every_try_says_so() -> None:
    health = examine()
    ours = [each for each in health.tries if each.topology == "cpu"]
    assert {each.wall for each in ours} == set(STOPS)
    assert health.facts["allreduce on cpu"].startswith("CORRECT in ")
    assert {each.topology for each in health.tries} == {"cpu", *gpu_health.topologies()}


@pytest.mark.gpu
def test_every_wall_is_tried_beside_a_gpu() -> None:
    health = examine()
    assert health.trouble == ""
    for name in ("node", "shared"):
        assert health.facts[f"allreduce on {name}"].startswith("CORRECT in ")
        tries = [each for each in health.tries if each.topology == name]
        holding = {wall.name for wall in health.walls if not wall.why_not}
        assert {each.wall for each in tries} == set(STOPS)
        assert [each for each in tries if each.wall in holding and not each.refused] == []
    assert health.facts["GPUs"] == topology.gpu_name()
    assert health.facts["driver"][0].isdigit()
