"""GRPO on kernels.

    python -m training.grpo --model_name_or_path MODEL --output_dir OUT --problems train --backend cpp

A step's completions are evaluated together while the trainer waits, at most `--deadline_s` seconds.  Every argument of TRL's
GRPOConfig and ModelConfig can be given; `--config FILE.yaml` reads them from a file.  A run that was killed goes on from its
last checkpoint when it is started again with the same `--output_dir`.

Not here: several turns in one episode, data for SFT (`sft`).
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config

from pkb_env.cli import session
from pkb_env.evaluator import Evaluator
from pkb_env.store import Store
from training.rewarding import KernelReward
from training.settings import KernelArguments, folder, told


def ran(evaluator: Evaluator, store: Store, run: str, log: list[dict[str, Any]]) -> str:
    """What was really run: compilers, candidates on rank groups, and the share of the time that went into evaluating."""
    rows = {r.verdict: verdict for r, verdict in store.graded(run) if verdict is not None}
    groups, built = sum(bool(verdict.ranks) for verdict in rows.values()), evaluator.machine().broker.counters.built
    means, whole = [e["kernels/evaluation_s"] for e in log if "kernels/evaluation_s" in e], log[-1]
    steps, seconds = whole["step"], whole.get("train_runtime", 0.0)
    spent = sum(means) / max(1, len(means)) * steps
    return (
        f"{built} compiler runs, {groups} candidates on rank groups, {len(rows)} verdicts for {len(store.rollouts(run))} completions, "
        f"{3600 * len(rows) / max(1e-9, seconds):.0f} verdicts an hour, {spent / max(1e-9, seconds):.0%} of {seconds:.0f} s evaluating"
    )


def main(arguments: list[str] | None = None) -> GRPOTrainer:
    """Train; the trainer is given back with its log."""
    kernels, config, model = TrlParser((KernelArguments, GRPOConfig, ModelConfig)).parse_args_and_config(arguments)
    config.remove_unused_columns = False  # the reward needs the column `problem`
    store = Store(kernels.store)
    with Evaluator(kernels.config, store) as evaluator:
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
        trainer.train(resume_from_checkpoint=get_last_checkpoint(config.output_dir))
        trainer.save_model()
        print(ran(evaluator, store, config.run_name or config.output_dir, trainer.state.log_history))
    store.close()
    return trainer


if __name__ == "__main__":
    with told():
        main()
