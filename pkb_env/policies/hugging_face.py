"""A Hugging Face model folder as a policy: batches on a GPU if there is one, else on the CPU.  Needs transformers.

What the model is asked is a chat where its tokenizer has a template, else the plain text.  Only temperature and top-p shape the
draw: what the folder's own generation settings add, such as top-k, is left out.  A batch is seeded by its first answer, so a
run that nobody interrupts draws the same answers again on the same machine.

Not here: downloads; a model of the hub is fetched to a folder first.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from pkb_env.errors import UsageError
from pkb_env.policies import Ask, Policy, Sampling, text_before

_WHOLE = 16 << 20
"""Larger files are told apart by size, beginning and end."""
_END = 1 << 20


class HuggingFace:
    """A model folder.

    Raises:
        UsageError: no such folder, or transformers is not installed.
    """

    turns = True

    def __init__(self, folder: Path, sampling: Sampling) -> None:
        if not (folder / "config.json").is_file():
            wanted = "hf:FOLDER takes a folder with config.json, weights and tokenizer"
            raise UsageError(f"there is no model at {str(folder)!r}; {wanted}")
        try:
            self._library = importlib.import_module("transformers")
        except ImportError:
            raise UsageError("hf:FOLDER needs transformers; pip install 'pkb-env[train]'") from None
        self._library.utils.logging.disable_progress_bar()
        self._folder, self._sampling = folder, sampling
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._loaded: tuple[Any, Any] | None = None

    def setting(self) -> dict[str, Any]:
        """Path and contents of the folder, sampling, versions."""
        s = self._sampling
        return {
            "kind": "hf", "path": str(self._folder), "contents": _contents(self._folder), "temperature": s.temperature,
            "top_p": s.top_p, "max_new_tokens": s.max_new_tokens, "seed": s.seed or 0, "at_once": s.at_once,
            "device": self._device, "transformers": self._library.__version__, "torch": torch.__version__,
        }  # fmt: skip

    def draw(self, asks: Sequence[Ask]) -> Iterator[tuple[Ask, str]]:
        """Answers, a batch at a time."""
        for start in range(0, len(asks), self._sampling.at_once):
            batch = asks[start : start + self._sampling.at_once]
            yield from zip(batch, self._batch(batch), strict=True)

    def close(self) -> None:
        """Free the model."""
        self._loaded = None
        if self._device == "cuda":
            torch.cuda.empty_cache()

    def _batch(self, asks: Sequence[Ask]) -> list[str]:
        tokenizer, model = self._models()
        chat = tokenizer.chat_template is not None
        texts = [_chat(tokenizer, ask) if chat else text_before(ask.said) for ask in asks]
        given = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=not chat).to(self._device)
        length = given["input_ids"].shape[1]
        settings = self._settings(tokenizer, model, length)
        with torch.random.fork_rng(range(torch.cuda.device_count())), torch.inference_mode():
            torch.manual_seed(asks[0].seed(self._sampling.seed or 0))
            drawn = model.generate(
                input_ids=given["input_ids"], attention_mask=given["attention_mask"], generation_config=settings
            )
        found: list[str] = tokenizer.batch_decode(drawn[:, length:], skip_special_tokens=True)
        return found

    def _settings(self, tokenizer: Any, model: Any, length: int) -> Any:
        s, room = self._sampling, getattr(model.config, "max_position_embeddings", None)
        if room is not None and length >= room:
            raise UsageError(f"a prompt has {length} tokens, the model in {self._folder} takes {room}; use one that takes more")
        shape: dict[str, Any] = {"do_sample": False}
        if s.temperature:
            shape = {"do_sample": True, "temperature": s.temperature, "top_p": s.top_p, "top_k": 0}
        return self._library.GenerationConfig(
            max_new_tokens=min(s.max_new_tokens, room - length) if room else s.max_new_tokens,
            eos_token_id=model.generation_config.eos_token_id or tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id, **shape,
        )  # fmt: skip

    def _models(self) -> tuple[Any, Any]:
        """Tokenizer and model, loaded when they are first needed."""
        if self._loaded is None:
            try:
                tokenizer = self._library.AutoTokenizer.from_pretrained(self._folder, local_files_only=True, padding_side="left")
                model = self._library.AutoModelForCausalLM.from_pretrained(self._folder, local_files_only=True, dtype="auto")
            except (OSError, ValueError) as error:
                raise UsageError(f"the model in {self._folder} cannot be loaded: {error}") from error
            if tokenizer.pad_token_id is None:
                tokenizer.pad_token = tokenizer.eos_token
            self._loaded = tokenizer, model.to(self._device).eval()
        return self._loaded


def open_policy(rest: str, sampling: Sampling, backend: str) -> Policy:  # noqa: ARG001
    """The model in a folder."""
    return HuggingFace(Path(rest), sampling)


def _chat(tokenizer: Any, ask: Ask) -> str:
    text: str = tokenizer.apply_chat_template(ask.messages, add_generation_prompt=True, tokenize=False)
    return text


def _contents(folder: Path) -> str:
    """What tells two model folders apart."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read() if size <= _WHOLE else file.read(_END))
            if size > _WHOLE:
                file.seek(-_END, os.SEEK_END)
                digest.update(file.read())
    return digest.hexdigest()
