"""GPUs that train and GPUs that evaluate: made-up machines, no GPU is touched.

Not here: ranks on GPUs (`test_gpu`).
"""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from pkb_env import topology
from pkb_env.config import EvalConfig
from pkb_env.errors import UsageError
from pkb_env.submission import Submission
from training import devices
from training.settings import KernelArguments

FOUR = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}


@pytest.fixture(autouse=True)
def _eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "gpus", lambda: 8)
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_what_the_trainer_uses() -> None:
    launched = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    found = [devices.of_trainer(e) for e in ({}, FOUR, launched, {**launched, "CUDA_VISIBLE_DEVICES": "6,5,4"})]
    assert found == [tuple(range(8)), (0, 1, 2, 3), (0, 1), (6, 5)]
    assert [devices.of_trainer({"CUDA_VISIBLE_DEVICES": text}) for text in ("", "-1", "2,-1,3")] == [(), (), (2,)]


@pytest.mark.parametrize("text", ["a", "1,1", "1,", "-1", "1;2", "GPU-1234"])
def test_what_is_no_list_of_gpus_is_one_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"wanted the numbers of GPUs as nvidia-smi shows them"):
        devices.numbers(text)


@pytest.mark.parametrize(
    ("where", "given", "share", "use_cpu", "expected"),
    [
        ("node", "4,5,6,7", False, False, (4, 5, 6, 7)), ("shared", "7", False, False, (7,)), ("cpu", "", False, False, ()),
        ("node", "3", True, False, (3,)), ("node", "", True, False, (0, 1, 2, 3)), ("node", "", False, True, ()),
        ("node", "0,1", False, True, (0, 1)),
    ],
)  # fmt: skip
def test_who_may_evaluate(where: str, given: str, share: bool, use_cpu: bool, expected: tuple[int, ...]) -> None:
    assert devices.for_evaluation(where, 2, given, share=share, use_cpu=use_cpu, environment=FOUR) == expected


@pytest.mark.parametrize(("where", "given", "both"), [("node", "3,4", "3"), ("node", "", "0,1"), ("shared", "", "0")])
def test_a_gpu_that_trains_and_evaluates_is_refused(where: str, given: str, both: str) -> None:
    with pytest.raises(UsageError, match=rf"GPUs {both} would train and evaluate: the trainer uses 0,1,2,3, .*--share_device"):
        devices.for_evaluation(where, 2, given, share=False, use_cpu=False, environment=FOUR)


def test_gpus_for_a_topology_that_needs_none_are_refused() -> None:
    with pytest.raises(UsageError, match="topology 'cpu' uses no GPU"):
        devices.for_evaluation("cpu", 2, "4", share=False, use_cpu=False, environment=FOUR)


def test_arguments_become_settings_of_the_evaluator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert KernelArguments(topology="auto", evaluation_devices="4,5").placed().gpus == (4, 5)
    assert KernelArguments(topology="auto", evaluation_devices="4").settings.topology == "shared"
    with pytest.raises(UsageError, match=r"needs 2 GPUs, here are 1"):
        KernelArguments(topology="node", evaluation_devices="4").placed()
    with pytest.raises(UsageError, match=r"GPUs \[9\] of \[4, 9\] are not here"):
        KernelArguments(topology="node", evaluation_devices="4,9").placed()


def test_an_evaluator_keeps_to_its_gpus() -> None:
    assert topology.settled(Submission("", "", world_size=2, topology="auto"), (4,)).topology == "shared"
    assert topology.visible((6, 4)) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "6,4"}
    assert topology.visible(()) == {}
    with pytest.raises(ValidationError):
        EvalConfig(gpus=(-1,))
