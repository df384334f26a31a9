"""GRPO with several attempts in one conversation, for models that write code blocks.

    python -m training.grpo_multiturn --turns 3 --model_name_or_path MODEL --output_dir OUT --problems train --backend cpp

The loop is our own (`rollout_func`, which TRL calls experimental): all conversations write, all their candidates are
evaluated together, all read their feedback, which the loss does not see.  An episode is worth the discounted return of its
first turn (`rewards.discounted`).  `--max_completion_length` is the budget of a whole episode; vLLM is not used.

Not here: single attempts (`grpo`), models that call tools (`spec`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config

import rewards
from pkb_env.cli import session
from pkb_env.evaluator import Evaluator
from pkb_env.prompt import feedback
from pkb_env.store import Store
from pkb_env.submission import code_in
from rewards.verdict import Verdict
from training.rewarding import Batch, KernelReward, places_of, text_of
from training.settings import KernelArguments, folder, last_checkpoint, told

FEEDBACK_SHARE = 0.25
"""Of an episode's tokens, at most so many are feedback."""


@dataclass
class TurnArguments:
    """Command-line arguments about turns."""

    turns: int = field(default=3, metadata={"help": "attempts in one episode"})
    gamma: float = field(default=0.4, metadata={"help": "discount from one turn to the one before"})
    returns: str = field(default="sum", metadata={"help": "sum or max"})


@dataclass
class Conversation:
    """One episode: its tokens after the prompt, which of them the model wrote, and what came of its turns."""

    problem: str
    prompt_ids: list[int]
    said: str
    """What the next turn answers."""
    ids: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    """1 for a token of the model's, 0 for feedback."""
    verdicts: list[Verdict] = field(default_factory=list)
    scores: list[float | None] = field(default_factory=list)

    def add(self, ids: list[int], *, own: bool) -> None:
        """Append tokens."""
        self.ids += ids
        self.own += [int(own)] * len(ids)


class MultiTurn:
    """A `rollout_func`: prompts, samples of one prompt side by side -> tokens, masks and returns.

    Args:
        reward: evaluates and scores a turn.
        problems: prompt -> name of the problem.
        turns: how many there are, and what an episode is worth.
    """

    def __init__(self, reward: KernelReward, problems: dict[str, str], turns: TurnArguments) -> None:
        self._reward, self._problems, self._turns = reward, problems, turns

    def __call__(self, prompts: Sequence[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        """Play all episodes."""
        words, texts = trainer.processing_class, [text_of(prompt) for prompt in prompts]
        ids = words.apply_chat_template(list(prompts), add_generation_prompt=True, tokenize=True, return_dict=False)
        games = [Conversation(self._problems[text], each, text) for text, each in zip(texts, ids, strict=True)]
        for turn in range(self._turns.turns):
            batch = self._play(games, trainer)
            self._reward.keep(batch, places_of(texts), trainer.state.global_step, turn)
            if turn + 1 < self._turns.turns:
                self._tell(games, batch, words, trainer.max_completion_length)
        worth = [rewards.discounted(game.scores, self._turns.gamma, self._turns.returns)[0] for game in games]
        return {
            "prompt_ids": ids, "completion_ids": [game.ids for game in games], "logprobs": None,
            "env_mask": [game.own for game in games], "worth": worth,
            "statuses": [" ".join(verdict.status for verdict in game.verdicts) for game in games],
        }  # fmt: skip

    def _play(self, games: list[Conversation], trainer: GRPOTrainer) -> Batch:
        """One turn of all: write, evaluate, score."""
        most = int(trainer.max_completion_length * (1 - FEEDBACK_SHARE)) // self._turns.turns
        written = generate(trainer, [game.prompt_ids + game.ids for game in games], max(1, most))
        texts = trainer.processing_class.batch_decode(written, skip_special_tokens=True)
        histories = [tuple(game.verdicts) for game in games]
        batch = self._reward.evaluate([game.said for game in games], texts, [game.problem for game in games], histories)
        for game, new, verdict, score in zip(games, written, batch.verdicts, batch.rewards, strict=True):
            game.add(new, own=True)
            game.verdicts.append(verdict)
            game.scores.append(score)
        return batch

    def _tell(self, games: list[Conversation], batch: Batch, words: Any, budget: int) -> None:
        """Append the feedback as the next message; of a long one the beginning."""
        begin, end = around(words)
        most = max(0, int(budget * FEEDBACK_SHARE) // (self._turns.turns - 1) - len(begin) - len(end))
        for game, verdict, text in zip(games, batch.verdicts, batch.texts, strict=True):
            game.said = feedback(verdict, code_in(text))
            inner = words(game.said, add_special_tokens=False).input_ids[:most]
            said_end = game.ids[-1:] == begin[:1] == [words.eos_token_id]
            game.add(begin[said_end:] + inner + end, own=False)


def around(words: Any) -> tuple[list[int], list[int]]:
    """Tokens of the chat template from the end of an answer to the next message's content, and after it."""
    answer, question = "\u241e", "\u241f"
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    text = words.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    begin, end = text.split(answer)[-1].split(question)
    return words(begin, add_special_tokens=False).input_ids, words(end, add_special_tokens=False).input_ids


def generate(trainer: GRPOTrainer, contexts: list[list[int]], most: int) -> list[list[int]]:
    """New tokens for every context, up to and with the end of the answer."""
    words = trainer.processing_class
    padded = words.pad({"input_ids": contexts}, padding_side="left", return_tensors="pt").to(trainer.accelerator.device)
    model = trainer.accelerator.unwrap_model(trainer.model)
    with torch.no_grad():
        out = model.generate(
            **padded, max_new_tokens=most, do_sample=True, temperature=trainer.temperature, top_k=0,
            eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
        )  # fmt: skip
    return [ended(row, words.eos_token_id, words.pad_token_id) for row in out[:, padded["input_ids"].shape[1] :].tolist()]


def ended(row: list[int], end: int, pad: int) -> list[int]:
    """Tokens up to and with the end; without padding where there is none; at least one."""
    if end in row:
        return row[: row.index(end) + 1]
    return [token for token in row if token != pad] or row[:1]


def worth_of_episode(worth: list[float | None], statuses: list[str], **more: Any) -> list[float | None]:
    """The reward function: what `MultiTurn` found."""
    log_extra: Callable[[str, list[Any]], None] | None = more.get("log_extra")
    if log_extra:
        log_extra("statuses", statuses)
    return worth


def main(arguments: list[str] | None = None) -> GRPOTrainer:
    """Train; the trainer is given back with its log."""
    parser = TrlParser((TurnArguments, KernelArguments, GRPOConfig, ModelConfig))
    turns, kernels, config, model = parser.parse_args_and_config(arguments)
    where = kernels.placed(use_cpu=config.use_cpu)
    rows, store = kernels.rows(turns.turns), Store(kernels.store)
    with Evaluator(where, store) as evaluator:
        reward = KernelReward(
            evaluator, session.reward(kernels.reward), kernels.settings,
            store=store, run=config.run_name or config.output_dir, deadline_s=kernels.deadline_s,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=folder(model.model_name_or_path), args=config, train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path, padding_side="left"),
            peft_config=get_peft_config(model), reward_funcs=worth_of_episode,
            rollout_func=MultiTurn(reward, {text_of(row["prompt"]): row["problem"] for row in rows}, turns),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=last_checkpoint(config.output_dir))
        trainer.save_model()
    store.close()
    return trainer


if __name__ == "__main__":
    with told():
        main()
