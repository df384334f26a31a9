"""A causal language model of at most a few million parameters with a tokenizer of its own, made from a file of texts.

`python -m training.tiny OUT TEXTS.jsonl` writes a folder for `--model_name_or_path`; nothing is downloaded.  The model is
random: SFT comes first.  With `--lines` a token may be as long as a line, so that a program is tens of tokens; for texts that
repeat their lines.

Not here: training it (`sft`, `grpo`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CONTEXT = 4096
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tokenizer(texts: Iterable[str], vocabulary: int = 2048, *, lines: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the texts, whose tokens are at most words, or lines; any text survives the way there and back."""
    bpe = Tokenizer(models.BPE(unk_token=None))
    whole = [pre_tokenizers.Split(Regex(r"[^\n]*\n"), "isolated")] if lines else []
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*whole, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not lines)])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe, pad_token=_SPECIAL[0], eos_token=_SPECIAL[2], padding_side="left", chat_template=TEMPLATE
    )


def model(words: PreTrainedTokenizerFast, hidden: int = 192, layers: int = 4, seed: int = 0) -> LlamaForCausalLM:
    """A random model for the tokenizer; the defaults have about two million parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 32, max_position_embeddings=_CONTEXT,
        tie_word_embeddings=True, pad_token_id=words.pad_token_id, eos_token_id=words.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def write(folder: Path, texts: Iterable[str], *, lines: bool = False, **sizes: int) -> int:
    """Make both and save them; the number of parameters."""
    words = tokenizer(texts, lines=lines)
    made = model(words, **sizes)
    made.save_pretrained(folder)
    words.save_pretrained(folder)
    return sum(parameter.numel() for parameter in made.parameters())


def main() -> None:
    """Make a folder from rows with `prompt` and `completion`."""
    parser = argparse.ArgumentParser(prog="python -m training.tiny", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="a folder to make")
    parser.add_argument("rows", type=Path, help="a .jsonl file of `pkb export`")
    parser.add_argument("--lines", action="store_true", help="tokens may be as long as a line")
    a = parser.parse_args()
    if not a.rows.is_file():
        parser.error(f"there is no file {a.rows}; `pkb export STORE {a.rows}` makes one")
    rows = map(json.loads, a.rows.read_text(encoding="utf-8").splitlines())
    texts = [text for row in rows for text in (row["prompt"], row["completion"])]
    if not texts:
        parser.error(f"{a.rows} has no rows to make a tokenizer of")
    print(f"{write(a.out, texts, lines=a.lines):,} parameters in {a.out}")


if __name__ == "__main__":
    main()
