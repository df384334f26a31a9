"""What several models reach on the same prompts, side by side: mean reward, correct@1, fast_1@1, with intervals.

    python -m training.compare sft=OUT/sft grpo=OUT/grpo --problems gather reduce --backend cpp --store data.db -n 64

Every model answers every prompt so many times; equal candidates have one verdict, looked up in the store or earned now, so the
same program counts the same whoever wrote it.  Intervals at 95 % have the samples as trials: Wilson for shares, bootstrap within
problems for the reward.  They say how far other samples of these models on these problems could be off, not other problems.

Not here: training, many problems with pass@k (`pkb evaluate`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser

import rewards
from pkb_env.errors import UsageError
from pkb_env.evaluator import Evaluator
from pkb_env.markdown import table
from pkb_env.metrics import Sample, wilson
from pkb_env.policies import Ask, Sampling, open_policy
from pkb_env.store import Store
from training.rewarding import Batch, KernelReward
from training.settings import KernelArguments, told

_RESAMPLED = 2000


@dataclass
class CompareArguments:
    """Which models, and how often they answer."""

    models: list[str] = field(metadata={"help": "NAME=FOLDER ..."})
    samples: int = field(default=64, metadata={"help": "answers to every prompt"})
    max_new_tokens: int = field(default=256, metadata={"help": "longest answer, in tokens"})
    seed: int = field(default=0, metadata={"help": "of the samples"})


def drawn(folder: Path, rows: Sequence[dict[str, str]], wanted: CompareArguments) -> list[tuple[str, str]]:
    """Problem and answer of every sample, at temperature 1."""
    sampling = Sampling(max_new_tokens=wanted.max_new_tokens, seed=wanted.seed, at_once=wanted.samples)
    policy = open_policy(f"hf:{folder}", sampling, "")
    asks = [Ask(row["problem"], i, 0, (row["prompt"],)) for row in rows for i in range(wanted.samples)]
    found = [(ask.problem, text) for ask, text in policy.draw(asks)]
    policy.close()
    return found


def row(name: str, batch: Batch) -> list[str]:
    """A line of the table; what the harness failed on is left out."""
    pairs = [(v.problem, score.total, Sample.of(v, 0)) for v, score in zip(batch.verdicts, batch.scores, strict=True)]
    counted = [(problem, total, sample) for problem, total, sample in pairs if sample.counted]
    if not counted:
        return [name, "0", "-", "-", "-", "-"]
    share = [sum(sample.reaches(p) for _, _, sample in counted) for p in (0, 1)]
    return [
        name, str(len(counted)), _reward([(problem, total) for problem, total, _ in counted]),
        *(_share(reached, len(counted)) for reached in share), str(len(set(batch.texts))),
    ]  # fmt: skip


def _share(reached: int, of: int) -> str:
    low, high = wilson(reached / of, of)
    return f"{reached / of:.2f} [{low:.2f}, {high:.2f}]"


def _reward(scored: Sequence[tuple[str, float]]) -> str:
    """Mean and bootstrap interval, resampled within problems."""
    of: dict[str, list[float]] = {}
    for problem, total in scored:
        of.setdefault(problem, []).append(total)
    chance = random.Random(0)  # noqa: S311  resampling
    means = sorted(
        sum(sum(chance.choices(group, k=len(group))) for group in of.values()) / len(scored) for _ in range(_RESAMPLED)
    )
    low, high = means[int(0.025 * _RESAMPLED)], means[int(0.975 * _RESAMPLED) - 1]
    return f"{sum(total for _, total in scored) / len(scored):.2f} [{low:.2f}, {high:.2f}]"


def named(models: Sequence[str]) -> dict[str, Path]:
    """Folders by name.

    Raises:
        UsageError: not NAME=FOLDER.
    """
    pairs = [text.partition("=") for text in models]
    if wrong := [text for text, (_, equals, folder) in zip(models, pairs, strict=True) if not (equals and folder)]:
        raise UsageError(f"--models {wrong[0]}: wanted NAME=FOLDER")
    return {name: Path(folder) for name, _, folder in pairs}


def main(arguments: list[str] | None = None) -> dict[str, Batch]:
    """Draw, evaluate, print; what every model's samples earned is given back."""
    wanted, kernels = HfArgumentParser((CompareArguments, KernelArguments)).parse_args_into_dataclasses(arguments)
    rows = [{"problem": row["problem"], "prompt": row["prompt"][-1]["content"]} for row in kernels.rows()]
    answers = {name: drawn(folder, rows, wanted) for name, folder in named(wanted.models).items()}
    store, start, found = Store(kernels.store), time.monotonic(), dict[str, Batch]()
    with Evaluator(kernels.config, store) as evaluator:
        reward = KernelReward(evaluator, rewards.get(kernels.reward), kernels.settings, deadline_s=kernels.deadline_s)
        for name, texts in answers.items():
            said = [text for _, text in texts]
            found[name] = reward.evaluate(said, said, [problem for problem, _ in texts])
    columns = ("policy", "samples", f"reward `{kernels.reward}`", "correct@1", "fast_1@1", "different")
    print(f"{', '.join(row['problem'] for row in rows)}: {wanted.samples} samples each, {kernels.backend}, "
          f"W={kernels.world_size}, {time.monotonic() - start:.0f} s of evaluations")  # fmt: skip
    print(table(columns, (row(name, batch) for name, batch in found.items()), words=("policy",)))
    store.close()
    return found


if __name__ == "__main__":
    with told():
        main()
