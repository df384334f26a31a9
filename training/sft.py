"""SFT on completions that earned their verdict.

    pkb export STORE correct.parquet --only correct
    python -m training.sft --rows correct.parquet --model_name_or_path MODEL --output_dir OUT

Rows have a `prompt` and a `completion`.  Every argument of TRL's
SFTConfig and ModelConfig can be given.  A run that was killed goes on from its last checkpoint.

Not here: where candidates come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from transformers import AutoTokenizer
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config

from pkb_env.errors import UsageError
from training.settings import folder, last_checkpoint, told


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
    """The rows of a file as conversations.

    Raises:
        UsageError: another kind of file, or rows without a prompt or a completion.
    """
    kind = {".parquet": "parquet", ".jsonl": "json"}.get(Path(path).suffix)
    if kind is None or not Path(path).is_file():
        raise UsageError(f"--rows {path}: wanted a .parquet or .jsonl file that `pkb export` made")
    rows = load_dataset(kind, data_files=path, split="train")
    if missing := {"prompt", "completion"} - set(rows.column_names):
        raise UsageError(f"{path} has no column {', '.join(sorted(missing))}; `pkb export` makes such files")
    if not all(rows["prompt"]):
        raise UsageError(f"{path} has rows without a prompt; they would teach to answer nothing")
    return rows.map(conversation, remove_columns=rows.column_names)


def main(arguments: list[str] | None = None) -> SFTTrainer:
    """Train; the trainer is given back with its log."""
    rows, config, model = TrlParser((RowArguments, SFTConfig, ModelConfig)).parse_args_and_config(arguments)
    trainer = SFTTrainer(
        model=folder(model.model_name_or_path), args=config, train_dataset=read(rows.rows),
        processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path, padding_side="left"),
        peft_config=get_peft_config(model),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=last_checkpoint(config.output_dir))
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    with told():
        main()
