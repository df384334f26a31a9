"""Which GPUs the trainer has and which ones evaluate: apart, or shared because somebody said so.

Numbers are the machine's, as nvidia-smi shows them; nothing here wakes a driver.
Not here: what an evaluator does with its GPUs (`pkb_env.topology`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from pkb_env import topology
from pkb_env.errors import UsageError


def numbers(text: str, name: str = "--evaluation_devices") -> tuple[int, ...]:
    """GPUs as they are named on a command line: `4,5,6`.

    Raises:
        UsageError: something else, or one of them twice.
    """
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(part.isascii() and part.isdigit() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise UsageError(f"{name} {text!r}: wanted the numbers of GPUs as nvidia-smi shows them, each once, such as 4,5,6,7")
    return tuple(map(int, parts))


def of_trainer(environment: Mapping[str, str]) -> tuple[int, ...]:
    """The GPUs of all trainer processes here: one for each that a launcher started, else all that CUDA may see.

    Raises:
        UsageError: CUDA_VISIBLE_DEVICES names GPUs by something else than numbers.
    """
    name, here = "CUDA_VISIBLE_DEVICES", range(topology.gpus())
    seen = numbers(environment[name].partition("-1")[0].rstrip(","), name) if name in environment else tuple(here)
    launched = int(environment.get("LOCAL_WORLD_SIZE", "0")) if "LOCAL_RANK" in environment else 0
    return seen[: launched or None]


def for_evaluation(
    where: str, world_size: int, given: str, *, share: bool, use_cpu: bool, environment: Mapping[str, str] = os.environ
) -> tuple[int, ...]:
    """The GPUs that may evaluate; none named: all of the machine, from the first one on.

    Args:
        where: topology, not `auto`.
        world_size: number of ranks.
        given: `--evaluation_devices`.
        share: whether trainer and evaluation may have the same GPU.
        use_cpu: whether the trainer itself needs none.
        environment: the trainer's variables.

    Raises:
        UsageError: the trainer uses one of them, they are too few, or none is needed.
    """
    wanted = numbers(given)
    if where == "cpu":
        if wanted:
            raise UsageError(f"--evaluation_devices {given}: topology 'cpu' uses no GPU; leave it out or name another --topology")
        return ()
    trainer = () if use_cpu else of_trainer(environment)
    found = wanted or (trainer if share else ())
    if not share:
        _apart(trainer, found or tuple(dict.fromkeys(topology.devices(where, world_size))))
    return found


def _apart(trainer: tuple[int, ...], evaluation: tuple[int, ...]) -> None:
    both, *sides = (",".join(map(str, gpus)) for gpus in (sorted({*trainer} & {*evaluation}), trainer, evaluation))
    if both:
        raise UsageError(
            f"GPUs {both} would train and evaluate: the trainer uses {sides[0]}, evaluation {sides[1]}; name others in "
            "--evaluation_devices, give the trainer fewer with CUDA_VISIBLE_DEVICES, or say --share_device true: the trainer"
            " waits meanwhile, but its memory stays there, and times are those of a shared GPU"
        )
