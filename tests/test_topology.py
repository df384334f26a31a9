"""Where ranks may live: GPUs counted in a folder of the test's own, real evaluations on the CPU, errors that name the way out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import gymnasium
import pytest
import torch.version

import problems
from pkb_env import topology
from pkb_env.assembly import Case
from pkb_env.attempt import Result
from pkb_env.boxes import Task
from pkb_env.config import EvalConfig
from pkb_env.env import ParallelKernelEnv
from pkb_env.errors import UsageError
from pkb_env.evaluator import Evaluator
from pkb_env.machine import Machine
from pkb_env.outcome import Outcome
from pkb_env.peaks import Peaks
from pkb_env.registration import ID
from pkb_env.submission import Candidate, Submission
from pkb_env.timing import Speed
from pkb_env.vector import ParallelKernelVectorEnv
from rewards.verdict import Status, Verdict

GOOD = "import torch.distributed as dist\n\n\ndef solution(tensor):\n    dist.all_reduce(out := tensor.clone())\n    return out\n"
OTHERS = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia-caps", "nvidiaX", "nvidia0x", "null")
"""What lies beside the files of the GPUs and is none."""
Fake = Callable[[int], None]
NO_GPU = "topology 'node' with 2 ranks needs 2 GPUs, here are 0; use 'cpu' (this machine has no GPU that torch can use)"


@pytest.fixture
def machine_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """Makes this process see a machine with so many GPUs and a torch that was built with CUDA."""
    devices, driver = tmp_path / "dev", tmp_path / "driver"
    driver.mkdir()

    def see(count: int) -> None:
        devices.mkdir()
        for name in (*OTHERS, *(f"nvidia{i}" for i in range(count))):
            (devices / name).touch()

    monkeypatch.setattr(topology, "_DEVICES", devices)
    monkeypatch.setattr(topology, "_DRIVER", driver)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    topology.gpu_name.cache_clear()
    yield see
    topology.gpu_name.cache_clear()


def on(where: str, world_size: int = 2) -> Submission:
    return Submission(GOOD, "allreduce", world_size=world_size, topology=where, size="tiny")


@pytest.mark.parametrize("count", [0, 1, 8, 12])
def test_gpus_are_counted_without_their_company(machine_with: Fake, count: int) -> None:
    machine_with(count)
    assert topology.gpus() == count


def test_a_torch_without_cuda_has_no_gpus(machine_with: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(4)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert topology.gpus() == 0
    assert topology.choose(2) == ("cpu", "this machine has no GPU that torch can use")


def test_a_machine_without_devices_has_no_gpus(machine_with: Fake, tmp_path: Path) -> None:
    assert callable(machine_with)
    assert not (tmp_path / "dev").exists()
    assert topology.gpus() == 0


@pytest.mark.parametrize(("count", "world_size", "best", "why"), [
    (0, 1, "cpu", "no GPU"), (1, 1, "node", "as many GPUs as ranks"), (4, 4, "node", "as many GPUs as ranks"),
    (4, 2, "node", "as many GPUs as ranks"), (1, 2, "shared", "there are fewer GPUs than ranks"),
    (3, 4, "shared", "there are fewer GPUs than ranks"),
])  # fmt: skip
def test_auto_is_the_best_there_is(machine_with: Fake, count: int, world_size: int, best: str, why: str) -> None:
    machine_with(count)
    chosen, reason = topology.choose(world_size)
    assert chosen == best
    assert why in reason
    assert topology.named("auto", world_size) == best
    assert topology.settled(on("auto", world_size)) == on(best, world_size)


@pytest.mark.parametrize(("count", "where", "world_size"), [
    (0, "cpu", 4), (2, "cpu", 4), (2, "node", 2), (4, "node", 2), (1, "shared", 4), (8, "shared", 2),
])  # fmt: skip
def test_what_is_named_and_fits_stays(machine_with: Fake, count: int, where: str, world_size: int) -> None:
    machine_with(count)
    assert topology.named(where, world_size) == where
    assert topology.settled(on(where, world_size)) == on(where, world_size)


@pytest.mark.parametrize(("count", "where", "needed", "use"), [
    (0, "node", 4, "'cpu' (this machine has no GPU"), (0, "shared", 1, "'cpu' (this machine has no GPU"),
    (1, "node", 4, "'shared' (there are fewer GPUs than ranks)"), (3, "node", 4, "'shared' (there are fewer GPUs than ranks)"),
])  # fmt: skip
def test_too_few_gpus_are_one_error_with_a_way_out(machine_with: Fake, count: int, where: str, needed: int, use: str) -> None:
    machine_with(count)
    with pytest.raises(UsageError) as caught:
        topology.settled(on(where, 4))
    message = str(caught.value)
    assert message.startswith(f"topology {where!r} with 4 ranks needs {needed} GPUs, here are {count}; use {use}")
    assert "\n" not in message


def test_an_unknown_topology_names_those_there_are(machine_with: Fake) -> None:
    machine_with(2)
    with pytest.raises(UsageError, match=re.escape("topology 'moon' does not exist; there is cpu, node, shared, and auto")):
        topology.settled(on("moon"))


def test_every_topology_says_devices_backend_and_environment() -> None:
    assert [topology.devices(name, 3) for name in topology.TOPOLOGIES] == [[], [0, 1, 2], [0, 0, 0]]
    assert [topology.group_backend(name) for name in topology.TOPOLOGIES] == ["gloo", "nccl", "gloo"]
    allowed = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    assert [topology.environment(name) for name in topology.TOPOLOGIES] == [{}, {}, allowed]
    assert Task("allreduce", 1, 3, "tiny", "hardened", "bfloat16", "node").devices == [0, 1, 2]


def test_a_gpu_is_called_by_its_model(machine_with: Fake, tmp_path: Path) -> None:
    machine_with(2)
    cards = {"0000:0a:00.0": "IRQ: 1\nno model\n", "0000:0b:00.0": "IRQ: 2\nModel: \t\t NVIDIA H200  \nGPU UUID: x\n"}
    for bus, text in cards.items():
        (tmp_path / "driver" / bus).mkdir()
        (tmp_path / "driver" / bus / "information").write_text(text)
    assert topology.gpu_name() == "NVIDIA H200 x2"


def test_a_gpu_without_information_is_counted(machine_with: Fake) -> None:
    machine_with(3)
    assert topology.gpu_name() == "GPU x3"


# ---- evaluator and environment ----------------------------------------------------------------------------------------


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process sees no GPU, on a machine with some too."""
    monkeypatch.setattr(torch.version, "cuda", None)


@pytest.mark.usefixtures("no_gpu")
def test_auto_evaluates_on_the_cpu_without_gpus(evaluator: Evaluator) -> None:
    auto = evaluator.evaluate(on("auto"))
    assert auto.correct, auto.message
    assert auto.topology == "cpu"


@pytest.mark.usefixtures("no_gpu")
def test_an_environment_with_auto_lives_on_the_cpu_without_gpus() -> None:
    env = gymnasium.make(ID, topology="auto", size="tiny", config={"trials": 1, "pairs": 0})
    observation, _ = env.reset(seed=0, options={"problem": "allreduce"})
    info = env.step(GOOD)[-1]
    env.close()
    assert (info["verdict"]["status"], info["verdict"]["topology"]) == ("CORRECT", "cpu")
    plain = ParallelKernelEnv(topology="cpu", size="tiny", config={"trials": 1, "pairs": 0})
    assert observation["prompt"] == plain.reset(seed=0)[0]["prompt"]


def test_an_environment_with_auto_looks_at_the_gpus_that_may_be_used(machine_with: Fake) -> None:
    """By its own settings, or by those of the evaluator that is handed in, whose deadlines its prompts tell too."""
    machine_with(4)
    few = EvalConfig(gpus=(2,), call_deadline_s=7.0)
    for settings in ({"config": few}, {"evaluator": Evaluator(few)}):
        env = ParallelKernelEnv(backend="cuda", topology="auto", **settings)
        env.reset(seed=0)
        asked = env.prepare(GOOD)
        assert isinstance(asked, Submission)
        assert asked.topology == "shared"
    assert "7 s for one call" in ParallelKernelEnv(evaluator=Evaluator(few)).reset(seed=0)[0]["prompt"]
    assert "7 s for one call" in ParallelKernelVectorEnv(2, evaluator=Evaluator(few)).reset(seed=0)[0]["prompt"][0]


@pytest.mark.usefixtures("no_gpu")
def test_the_evaluator_refuses_node_without_gpus_and_runs_nothing() -> None:
    with Evaluator(EvalConfig(pairs=0)) as evaluator:
        for call in (evaluator.evaluate, lambda submission: evaluator.evaluate_many([submission])):
            with pytest.raises(UsageError) as caught:
                call(on("node"))
            assert str(caught.value) == NO_GPU
        assert evaluator._machine is None  # noqa: SLF001  nothing was started for it


@pytest.mark.usefixtures("no_gpu")
def test_an_environment_refuses_node_without_gpus_at_its_first_step(evaluator: Evaluator) -> None:
    env = ParallelKernelEnv(topology="node", size="tiny", evaluator=evaluator)
    env.reset(seed=0)
    with pytest.raises(UsageError) as caught:
        env.step(GOOD)
    assert str(caught.value) == NO_GPU


# ---- verdicts -----------------------------------------------------------------------------------------------------------

SPEED = Speed(time_ms=1.0, reference_ms=2.0, speedup=2.0, low=1.9, high=2.1, faster=True, skew=0.0, pairs=40)


def verdict_of(machine: Machine, where: str, world_size: int) -> Verdict:
    """The verdict that a timed, correct attempt would get there."""
    case = Case(on(where, world_size), problems.load("allreduce"), Candidate(GOOD), ())
    return case.verdict(machine, Result(Outcome(Status.CORRECT, "time", "", ()), passed=1.0, speed=SPEED))


def test_times_on_a_shared_gpu_compare_with_nothing(evaluator: Evaluator, machine_with: Fake) -> None:
    machine_with(1)
    verdict = verdict_of(evaluator.machine(), "shared", 1)
    assert not verdict.comparable
    assert verdict.notes == ("shared: the ranks take turns on one GPU",)
    assert verdict.bound_ms is None
    assert (verdict.speedup, verdict.time_ms) == (2.0, 1.0)  # told, yet compared with nothing
    assert (verdict.topology, verdict.dtype, verdict.hardware) == ("shared", "bfloat16", "GPU x1")


def test_times_on_gpus_of_their_own_compare(evaluator: Evaluator, machine_with: Fake) -> None:
    machine_with(1)
    machine = replace(evaluator.machine(), _peaks={"node": Peaks(1e9, 1e12, 1e9)})
    verdict = verdict_of(machine, "node", 1)
    assert verdict.comparable
    assert verdict.notes == ()
    problem = problems.load("allreduce")
    assert verdict.bound_ms == pytest.approx(problem.cost(problem.size("tiny"), 1, 2).memory_bytes / 1e6)
    assert (verdict.dtype, verdict.hardware) == ("bfloat16", "GPU x1")


def test_times_on_the_cpu_have_a_bound(evaluator: Evaluator) -> None:
    verdict = verdict_of(evaluator.machine(), "cpu", 1)
    assert verdict.comparable
    assert verdict.bound_ms is not None
    assert verdict.dtype == "float32"


def test_a_shared_verdict_is_not_comparable_without_times_either(evaluator: Evaluator, machine_with: Fake) -> None:
    machine_with(1)
    case = Case(on("shared"), problems.load("allreduce"), Candidate(GOOD), ())
    verdict = case.verdict(evaluator.machine(), Result(Outcome(Status.WRONG_RESULT, "judge", "", ())))
    assert not verdict.comparable
    assert verdict.speedup is None
    assert verdict.bound_ms is None
