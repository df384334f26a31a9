"""GRPO on kernels.

    python -m training.grpo --model_name_or_path MODEL --output_dir OUT --problems train --backend cpp

A step's completions are evaluated together while the trainer waits, at most `--deadline_s` seconds.  Every argument of TRL's
GRPOConfig and ModelConfig can be given; `--config FILE.yaml` reads them from a file.  A run that was killed goes on from its
last checkpoint when it is started again with the same `--output_dir`.

Not here: several turns in one episode, data for SFT (`sft`).
"""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config

from pkb_env.cli import session
from pkb_env.evaluator import Evaluator
from pkb_env.store import Store
from training.rewarding import KernelReward
from training.settings import KernelArguments, folder, last_checkpoint, told


def ran(built: int, store: Store, before: int, log: list[dict[str, Any]]) -> str:
    """What was really run: compilers, candidates on rank groups, and the share of the time that went into evaluating.

    Args:
        built: compiler runs of all processes.
        store: where the verdicts of the run are.
        before: the last row of the store before the run.
        log: the trainer's.
    """
    new = [stored.verdict for stored in store.search() if stored.id > before]
    groups = sum(bool(verdict.ranks) for verdict in new)
    means = [entry["kernels/evaluation_s"] for entry in log if "kernels/evaluation_s" in entry]
    spent, seconds = sum(means) / max(1, len(means)) * log[-1]["step"], max(1e-9, log[-1].get("train_runtime", 0.0))
    return (
        f"{built} compiler runs, {groups} candidates on rank groups ({3600 * groups / seconds:.0f} an hour), "
        f"{len(new)} new verdicts in all, {spent / seconds:.0%} of {seconds:.0f} s evaluating"
    )


def main(arguments: list[str] | None = None) -> GRPOTrainer:
    """Train; the trainer is given back with its log."""
    kernels, config, model = TrlParser((KernelArguments, GRPOConfig, ModelConfig)).parse_args_and_config(arguments)
    config.remove_unused_columns = False  # the reward needs the column `problem`
    where, store = kernels.placed(use_cpu=config.use_cpu), Store(kernels.store)
    before = max((stored.id for stored in store.search(limit=1)), default=0)
    with Evaluator(where, store) as evaluator:
        reward = KernelReward(
            evaluator, session.reward(kernels.reward), kernels.settings,
            store=store, run=config.run_name or config.output_dir, deadline_s=kernels.deadline_s,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=folder(model.model_name_or_path), reward_funcs=reward, args=config,
            train_dataset=Dataset.from_list(kernels.rows()),
            processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path, padding_side="left"),
            peft_config=get_peft_config(model),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=last_checkpoint(config.output_dir))
        trainer.save_model()
        built = torch.tensor(evaluator.machine().broker.counters.built, device=trainer.accelerator.device)
        built = trainer.accelerator.reduce(built)
        if trainer.is_world_process_zero():
            print(ran(int(built), store, before, trainer.state.log_history))
    store.close()
    return trainer


if __name__ == "__main__":
    with told():
        main()
