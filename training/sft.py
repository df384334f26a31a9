"""SFT on completions that earned their verdict.

    pkb export STORE correct.parquet --only correct
    python -m training.sft --rows correct.parquet --model_name_or_path MODEL --output_dir OUT

Rows have a `prompt` and a `completion`.  Every argument of TRL's
SFTConfig and ModelConfig can be given.  A run that was killed goes on from its last checkpoint.

Not here: where candidates come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset, load_dataset
from transformers import AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config


@dataclass
class RowArguments:
    """Which rows."""

    rows: str = field(metadata={"help": "a .parquet or .jsonl file of `pkb export`"})


def conversation(row: dict[str, Any]) -> dict[str, Any]:
    """A row as one question and its answer."""
    return {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "completion": [{"role": "assistant", "content": row["completion"]}],
    }


def read(path: str) -> Dataset:
    """The rows of a file as conversations."""
    rows = load_dataset("parquet" if path.endswith(".parquet") else "json", data_files=path, split="train")
    return rows.map(conversation, remove_columns=rows.column_names)


def main(arguments: list[str] | None = None) -> SFTTrainer:
    """Train; the trainer is given back with its log."""
    rows, config, model = TrlParser((RowArguments, SFTConfig, ModelConfig)).parse_args_and_config(arguments)
    trainer = SFTTrainer(
        model=model.model_name_or_path, args=config, train_dataset=read(rows.rows),
        processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path, padding_side="left"),
        peft_config=get_peft_config(model),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=get_last_checkpoint(config.output_dir))
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
