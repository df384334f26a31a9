"""A random language model for tests, built from a configuration: it reads and writes bytes."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest


def build(folder: Path, room: int) -> Path:
    """The folder, with a model that takes so many bytes; the test is skipped where transformers is missing."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'pkb-env[train]'")
    tokenizers = pytest.importorskip("tokenizers")
    end = "<end>"
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate([*alphabet, end])}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=end).save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=room, eos_token_id=256, bos_token_id=256,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder
