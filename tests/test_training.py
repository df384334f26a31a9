"""Training: the batch reward on a real evaluator, and the real trainers for a step on a model of a few thousand parameters.

Not here: whether anything is learnt.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import problems
import rewards
from pkb_env.config import EvalConfig
from pkb_env.errors import HarnessError
from pkb_env.evaluator import Evaluator
from pkb_env.store import Store
from pkb_env.submission import Submission
from rewards import Verdict
from rewards.verdict import Status
from training import rewarding
from training.rewarding import KernelReward

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = Submission("", "", world_size=2, size="tiny")
GOOD = problems.reference_source(problems.load("allreduce"))
WRONG = "def solution(tensor):\n    return tensor.clone()\n"
TEXTS = [GOOD, WRONG, "no code", GOOD, f"Here:\n```python\n{WRONG}```"]
PROMPTS = [[{"role": "user", "content": text}] for text in ("first", "first", "first", "second", "second")]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "s.db")
    yield store
    store.close()


def test_the_queue_is_as_deep_as_slots_are_few() -> None:
    """Three slow candidates: in one slot two wait, then one; in three none; what the store knows never waits."""
    texts = [GOOD.replace("def solution", f"import time\ntime.sleep({1 + n / 10})\n\n\ndef solution") for n in range(3)]
    depths = []
    for slots in (1, 3):
        with Evaluator(EvalConfig(trials=1, pairs=0, slots=slots), Store(":memory:")) as evaluator:
            evaluator.evaluate(Submission(GOOD, "allreduce", world_size=2, size="tiny"))
            reward = KernelReward(evaluator, rewards.get("default"), SETTINGS)
            for _ in range(2):
                told = rewarding.metrics(reward.evaluate(["p"] * 3, texts, ["allreduce"] * 3))
                assert told["kernels/queue_depth"] * told["kernels/evaluation_s"] == pytest.approx(3 * told["kernels/wait_s"])
                depths.append(told["kernels/queue_depth"])
    assert 0.5 < depths[0] < 1.2  # (2 + 1 + 0) / 3
    assert max(depths[1:]) < 0.1


def test_a_batch_is_scored_told_and_kept(store: Store) -> None:
    extra: dict[str, list[Any]] = {}
    told: dict[str, float] = {}
    with Evaluator(EvalConfig(trials=1, pairs=0), store) as evaluator:
        reward = KernelReward(evaluator, rewards.get("default"), SETTINGS, store=store, run="r")
        completions = [[{"role": "assistant", "content": text}] for text in TEXTS]
        found = reward(
            PROMPTS, completions, problem=["allreduce"] * 5, log_extra=extra.__setitem__, log_metric=told.__setitem__,
            trainer_state=SimpleNamespace(global_step=7), completion_ids=None,
        )  # fmt: skip
    assert reward.__name__ == "default"
    assert found == [1.0, pytest.approx(-0.8), -1.0, 1.0, pytest.approx(-0.8)]
    assert extra["status"] == ["CORRECT", "WRONG_RESULT", "INVALID", "CORRECT", "WRONG_RESULT"]
    assert (told["kernels/correct"], told["kernels/invalid"], told["kernels/unscored"]) == (0.4, 0.2, 0.0)
    assert told["kernels/duplicates"] == pytest.approx(0.2)
    assert told["kernels/deadlock"] == 0.0
    assert (told["kernels/fast_1"], told["terms/log_speed"]) == (0.0, -1.0)
    graded = store.graded("r")
    assert [(r.step, r.group, r.sample, r.prompt, r.completion) for r, _ in graded] == [
        (7, 0, 0, "first", TEXTS[0]), (7, 0, 1, "first", TEXTS[1]), (7, 0, 2, "first", TEXTS[2]),
        (7, 1, 0, "second", TEXTS[3]), (7, 1, 1, "second", TEXTS[4]),
    ]  # fmt: skip
    assert [v.status.value for _, v in graded if v is not None] == extra["status"]


class Broken(Evaluator):
    """Cannot be started the first few times."""

    failures = 1

    def evaluate_many(self, submissions: Iterable[Submission], deadline_s: float | None = None) -> list[Verdict]:
        if self.failures:
            self.failures -= 1
            raise HarnessError("no process can be started")
        return super().evaluate_many(submissions, deadline_s)


@pytest.mark.parametrize(("failures", "expected"), [(1, [1.0]), (2, [None])])
def test_an_evaluator_that_fails_is_started_anew_and_costs_no_run(failures: int, expected: list[float | None]) -> None:
    with Broken(EvalConfig(trials=1, pairs=0)) as evaluator:
        evaluator.failures = failures
        reward = KernelReward(evaluator, rewards.get("default"), SETTINGS)
        with pytest.warns(RuntimeWarning, match="started anew: no process can be started"):
            assert reward(["p"], [GOOD], problem=["allreduce"]) == expected


@pytest.mark.slow
def test_what_is_late_is_unscored(store: Store) -> None:
    endless = "def solution(tensor):\n    while True:\n        pass\n"
    with Evaluator(EvalConfig(trials=1, pairs=0, call_deadline_s=300.0)) as evaluator:
        reward = KernelReward(evaluator, rewards.get("default"), SETTINGS, store=store, run="r", deadline_s=8.0)
        assert reward(["p"], [endless], problem=["allreduce"]) == [None]
        assert rewarding.metrics(reward.evaluate(["p"], [endless], ["allreduce"]))["kernels/unscored"] == 1.0
    assert [verdict for _, verdict in store.graded("r")] == [None]


def test_rewarding_needs_no_trainer() -> None:
    script = "import training.rewarding, sys; print(*sorted({'trl', 'datasets', 'transformers', 'wandb'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


SCRIPT = """
import json, sys
import torch
from transformers import LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import add_response_schema, qwen3_chat_template
from training import tiny
from training.settings import KernelArguments
from training.spec import KernelSpec

def call(code):
    return "<tool_call>\\n" + json.dumps({"name": "submit", "arguments": {"code": code}}) + "\\n</tool_call><|im_end|>"

wrong, right = sys.argv[1:3]
turns = [[call(wrong), "I will not.<|im_end|>"], [call(right)], [call(right)], ["Done.<|im_end|>"]]

class Scripted(LlamaForCausalLM):
    def generate(self, input_ids=None, **_):
        answers = [words(text, add_special_tokens=False).input_ids for text in turns.pop(0)]
        longest = max(map(len, answers))
        filled = [answer + [words.pad_token_id] * (longest - len(answer)) for answer in answers]
        return torch.cat([input_ids, torch.tensor(filled)], dim=1)

words = tiny.tokenizer([wrong, right])
words.chat_template = qwen3_chat_template
words = add_response_schema(words)
model = tiny.model(words, hidden=32, layers=1)
model.__class__ = Scripted
spec = KernelSpec(KernelArguments(problems=["allreduce"], size="tiny", pairs=0, trials=1, store=""), max_turns=2)
config = GRPOConfig(
    output_dir=sys.argv[3], max_steps=1, per_device_train_batch_size=2, num_generations=2, max_completion_length=4096,
    max_tool_calling_iterations=4, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
    save_strategy="no", logging_steps=1, disable_tqdm=True,
)
trainer = GRPOTrainer(
    model=model, processing_class=words, args=config, train_dataset=spec.train_dataset,
    environment_factory=spec.environment_factory, reward_funcs=spec.reward_funcs,
)
trainer.train()
print(json.dumps(trainer.state.log_history[0]))
"""


def test_a_model_that_calls_tools_tries_again_until_its_turns_are_over(tmp_path: Path) -> None:
    """A scripted model in the real trainer: wrong, then right, then over; the other sample of the group never calls."""
    pytest.importorskip("trl")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, WRONG, GOOD, str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["reward"] == pytest.approx(0.0)  # best of -0.8 and 1.0, and -1.0 for who submits nothing
    assert (told["kernels/attempts"], told["kernels/correct"], told["kernels/unscored"]) == (1.5, 0.5, 0.0)


TURNS = """
import json, sys
import torch
from transformers import LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer
from datasets import Dataset
from training import tiny
from training.grpo_multiturn import MultiTurn, TurnArguments, worth_of_episode
from training.rewarding import KernelReward
from training.settings import KernelArguments
from pkb_env.evaluator import Evaluator
from pkb_env.store import Store
import rewards

wrong, right, out = sys.argv[1:4]
end = "<|im_end|>"
turns = [[wrong + end, right + end], [right + end, "no code" + end]]
seen = []

class Scripted(LlamaForCausalLM):
    def generate(self, input_ids=None, **_):
        seen.append([words.decode([t for t in row if t != words.pad_token_id]) for row in input_ids.tolist()])
        answers = [words(text, add_special_tokens=False).input_ids for text in turns.pop(0)]
        longest = max(map(len, answers))
        filled = [answer + [words.pad_token_id] * (longest - len(answer)) for answer in answers]
        return torch.cat([input_ids, torch.tensor(filled)], dim=1)

words = tiny.tokenizer([wrong, right])
model = tiny.model(words, hidden=32, layers=1)
model.__class__ = Scripted
kernels = KernelArguments(problems=["allreduce"], size="tiny", pairs=0, trials=1)
config = GRPOConfig(
    output_dir=out, max_steps=1, per_device_train_batch_size=2, num_generations=2, max_completion_length=4096, use_cpu=True,
    bf16=False, gradient_checkpointing=False, report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True,
)
rows, store = kernels.rows(2), Store(out + ".db")
with Evaluator(kernels.config, store) as evaluator:
    reward = KernelReward(evaluator, rewards.get("default"), kernels.settings, store=store, run="r")
    play = MultiTurn(reward, {row["prompt"][-1]["content"]: row["problem"] for row in rows}, TurnArguments(turns=2, gamma=0.5))
    played = []
    def watched(prompts, trainer):
        played.append(play(prompts, trainer))
        return played[0]
    trainer = GRPOTrainer(
        model=model, processing_class=words, args=config, train_dataset=Dataset.from_list(rows), rollout_func=watched,
        reward_funcs=worth_of_episode,
    )
    trainer.train()
both = zip(played[0]["completion_ids"], played[0]["env_mask"])
own = [words.decode([token for token, mine in zip(ids, mask) if mine]) for ids, mask in both]
print(json.dumps({"reward": trainer.state.log_history[0]["reward"], "own": own, "seen": seen, "worth": played[0]["worth"]}))
"""


def test_a_whole_turn_is_evaluated_at_once_and_feedback_is_not_learnt(tmp_path: Path) -> None:
    """A scripted model in the real trainer, two episodes: wrong then right, right then no code."""
    pytest.importorskip("trl")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", TURNS, WRONG, GOOD, str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["worth"] == [pytest.approx(-0.8 + 0.5), pytest.approx(1.0 - 0.5)]
    assert told["reward"] == pytest.approx(0.1)
    end = "<|im_end|>"
    assert told["own"] == [f"{WRONG}{end}{GOOD}{end}", f"{GOOD}{end}no code{end}"]
    first, second = told["seen"][1]
    assert f"{WRONG}{end}\n<|im_start|>user\n" in first
    assert first.endswith(f"{end}\n<|im_start|>assistant\n")
    assert "\nWrong result: " in first.split(WRONG)[1]
    assert "\nCorrect" in second.split(GOOD)[-1]
    store = Store(tmp_path / "out.db")
    assert [(r.turn, r.group, r.sample, None if v is None else v.status.value) for r, v in store.graded("r")] == [
        (0, 0, 0, "WRONG_RESULT"), (0, 0, 1, "CORRECT"), (1, 0, 0, "CORRECT"), (1, 0, 1, "INVALID"),
    ]  # fmt: skip


MISTAKES = """
import sys
from training import grpo, settings, sft
folder = sys.argv[1]
plain = ["--model_name_or_path", folder, "--output_dir", folder + "/out", "--use_cpu", "true", "--bf16", "false"]
train, rows = [*plain, "--store", folder + "/s.db", "--problems", "allreduce"], [*plain, "--rows"]
for main, more in (
    (grpo.main, [*train, "nosuch"]), (grpo.main, [*train, "--reward", "kevni"]),
    (grpo.main, [*train, "--model_name_or_path", "/nope"]), (sft.main, [*rows, "/nope.jsonl"]),
    (sft.main, [*rows, folder + "/rows.jsonl"]),
):
    try:
        with settings.told():
            main(more)
    except SystemExit as end:
        print("exit", end.code, file=sys.stderr)
"""


def test_what_a_user_can_put_right_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "", "completion": "x"}) + "\n")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MISTAKES, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    told = [line for line in done.stderr.splitlines() if line.startswith(("pkb: ", "exit "))]
    assert told[1::2] == ["exit 2"] * 5, done.stderr
    for line, says in zip(told[::2], ("there is no problem 'nosuch'", "did you mean 'kevin'?", "there is no model folder /nope",
                                      "wanted a .parquet or .jsonl file", "has rows without a prompt"), strict=True):  # fmt: skip
        assert says in line


ALL = """
import sys
from pathlib import Path
from training import grpo, sft, tiny

sys.argv = ["tiny", sys.argv[1] + "/model", sys.argv[1] + "/rows.jsonl"]
tiny.main()
folder = Path(sys.argv[1]).parent
plain = "--use_cpu true --bf16 false --gradient_checkpointing false --disable_tqdm true --report_to none".split()
plain += ["--per_device_train_batch_size", "4"]
sft.main(["--rows", f"{folder}/rows.jsonl", "--model_name_or_path", f"{folder}/model", "--output_dir", f"{folder}/sft",
          "--max_steps", "2", *plain])
arguments = ["--model_name_or_path", f"{folder}/sft", "--output_dir", f"{folder}/grpo", "--store", f"{folder}/s.db",
             "--problems", "allreduce", "--size", "tiny", "--pairs", "0", "--trials", "1", "--num_generations", "4",
             "--max_completion_length", "16", "--save_steps", "1", "--run_name", "r", *plain]
grpo.main([*arguments, "--max_steps", "2"])
grpo.main([*arguments, "--max_steps", "3"])
"""


def test_a_model_goes_through_sft_and_grpo_and_an_ended_run_goes_on(tmp_path: Path) -> None:
    """Real trainers on real ranks: two steps each, then the same command for one step more."""
    pytest.importorskip("trl")
    rows = [{"prompt": "Write allreduce.", "completion": f"```python\n{GOOD}```"}] * 8
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", ALL, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "parameters in" in done.stdout
    store = Store(tmp_path / "s.db")
    assert [(r.step, r.sample) for r in store.rollouts("r")] == [(step, sample) for step in range(3) for sample in range(4)]
    assert all(verdict is not None for _, verdict in store.graded("r"))


def test_several_trainer_processes_evaluate_what_each_wrote(tmp_path: Path) -> None:
    """Two processes of the real trainer: every completion is kept once, and the summary is printed once."""
    pytest.importorskip("trl")
    from training import tiny  # noqa: PLC0415  needs what may be missing

    tiny.write(tmp_path / "model", [GOOD] * 2, hidden=32, layers=1)
    command = [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        "-m", "training.grpo", "--run_name", "r",
        "--model_name_or_path", tmp_path / "model", "--output_dir", tmp_path / "out", "--store", tmp_path / "s.db",
        "--prompt", "short", "--problems", "allreduce", "reduce", "--size", "tiny", "--num_generations", "2", "--max_steps", "2",
        "--per_device_train_batch_size", "2", "--max_completion_length", "4", "--use_cpu", "true", "--bf16", "false",
        "--report_to", "none", "--gradient_checkpointing", "false", "--disable_tqdm", "true", "--save_strategy", "no",
    ]  # fmt: skip
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("compiler runs") == 1
    with closing(Store(tmp_path / "s.db")) as store:
        graded = store.graded("r")
    assert len({(r.step, r.group, r.sample) for r, _ in graded}) == len(graded) == 2 * 2 * 2
    assert {r.step for r, _ in graded} == {0, 1}
    assert {v.status for _, v in graded if v is not None} == {Status.INVALID}
