"""A causal language model of at most a few million parameters with a tokenizer of its own, made from a file of texts.

`python -m training.tiny OUT TEXTS.jsonl` writes a folder for `--model_name_or_path`; nothing is downloaded.  The model is
random: SFT comes first.

Not here: training it (`sft`, `grpo`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CONTEXT = 4096
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tokenizer(texts: Iterable[str], vocabulary: int = 2048) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the texts; any text survives the way there and back."""
    bpe = Tokenizer(models.BPE(unk_token=None))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=_SPECIAL[0], eos_token=_SPECIAL[2], padding_side="left", chat_template=TEMPLATE
    )


def model(words: PreTrainedTokenizerFast, hidden: int = 192, layers: int = 4, seed: int = 0) -> Qwen2ForCausalLM:
    """A random model for the tokenizer; the defaults have about two million parameters."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(words), hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 32, max_position_embeddings=_CONTEXT,
        tie_word_embeddings=True, pad_token_id=words.pad_token_id, eos_token_id=words.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def write(folder: Path, texts: Iterable[str], **sizes: int) -> int:
    """Make both and save them; the number of parameters."""
    words = tokenizer(texts)
    made = model(words, **sizes)
    made.save_pretrained(folder)
    words.save_pretrained(folder)
    return sum(parameter.numel() for parameter in made.parameters())


def main() -> None:
    """Make a folder from rows with `prompt` and `completion`."""
    if len(sys.argv) != 3 or not Path(sys.argv[2]).is_file():
        raise SystemExit(f"wanted a folder to make and a .jsonl file of `pkb export`; came {' '.join(sys.argv[1:]) or 'nothing'}")
    folder, rows = Path(sys.argv[1]), Path(sys.argv[2]).read_text(encoding="utf-8").splitlines()
    texts = [text for row in map(json.loads, rows) for text in (row["prompt"], row["completion"])]
    if not texts:
        raise SystemExit(f"{sys.argv[2]} has no rows to make a tokenizer of")
    print(f"{write(folder, texts):,} parameters in {folder}")


if __name__ == "__main__":
    main()
