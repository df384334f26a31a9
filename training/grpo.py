"""GRPO on kernels.

    python -m training.grpo --model_name_or_path MODEL --output_dir OUT --problems train --backend cpp

A step's completions are evaluated together while the trainer waits, at most `--deadline_s` seconds.  Every argument of TRL's
GRPOConfig and ModelConfig can be given; `--config FILE.yaml` reads them from a file.  A run that was killed goes on from its
last checkpoint when it is started again with the same `--output_dir`.

Not here: several turns in one episode, data for SFT (`sft`).
"""

from __future__ import annotations

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config

from pkb_env.cli import session
from pkb_env.evaluator import Evaluator
from pkb_env.store import Store
from training.rewarding import KernelReward
from training.settings import KernelArguments, folder, last_checkpoint, told


def main(arguments: list[str] | None = None) -> GRPOTrainer:
    """Train; the trainer is given back with its log."""
    kernels, config, model = TrlParser((KernelArguments, GRPOConfig, ModelConfig)).parse_args_and_config(arguments)
    config.remove_unused_columns = False  # the reward needs the column `problem`
    where, store = kernels.placed(use_cpu=config.use_cpu), Store(kernels.store)
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
    store.close()
    return trainer


if __name__ == "__main__":
    with told():
        main()
