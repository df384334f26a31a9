"""Whether anything is learnt: two known candidates, one of them wrong, and the real trainer on the real evaluator.

Not here: what a model learns in minutes (`training/run_cpu.sh`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

import problems
from training.candidates import plain

ROOT = Path(__file__).resolve().parent.parent
GOOD = f"```python\n{problems.reference_source(problems.load('allreduce'))}```\n"
WRONG = "```python\ndef solution(tensor):\n    return tensor.clone()\n```\n"
SCRIPT = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from training import grpo, sft, tiny

folder, good, wrong = sys.argv[1:4]
prompt = "Write allreduce: torch, 2 ranks, cpu.\\n"
rows = [{"prompt": prompt, "completion": text} for text in [good, wrong, wrong] * 8]
Path(folder, "rows.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
tiny.write(Path(folder, "model"), [prompt, good, wrong], lines=True, hidden=64, layers=2)
plain = "--use_cpu true --bf16 false --gradient_checkpointing false --disable_tqdm true --report_to none".split()
plain += ["--save_strategy", "no", "--per_device_train_batch_size", "8", "--seed", "0"]
sft.main(["--rows", folder + "/rows.jsonl", "--model_name_or_path", folder + "/model", "--output_dir", folder + "/sft",
          "--max_steps", "240", "--learning_rate", "3e-3", *plain])
grpo.main(["--model_name_or_path", folder + "/sft", "--output_dir", folder + "/grpo",
           "--store", folder + "/s.db", "--prompt", "short", "--problems", "allreduce", "--size", "tiny", "--pairs", "0",
           "--trials", "1", "--num_generations", "8",
           "--max_completion_length", "64", "--max_steps", "12", "--learning_rate", "1e-3", *plain])

def mass(name, text):
    words, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name).eval()
    head = words.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
    given, said = words(head).input_ids, words(text + "<|im_end|>").input_ids
    with torch.no_grad():
        odds = model(torch.tensor([given + said])).logits[0, len(given) - 1 : -1].log_softmax(-1)
    return odds.gather(1, torch.tensor(said)[:, None]).sum().exp().item()

print(json.dumps({stage: [mass(f"{folder}/{stage}", text) for text in (good, wrong)] for stage in ("sft", "grpo")}))
"""


def test_probability_moves_to_the_better_of_two_forms(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path), GOOD, WRONG]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    (good_before, wrong_before), (good, wrong) = json.loads(done.stdout.strip().splitlines()[-1]).values()
    print(f"good {good_before:.2f} to {good:.2f}, wrong {wrong_before:.2f} to {wrong:.2f}")
    assert good > good_before + 0.1
    assert wrong < wrong_before - 0.1


def test_plain_candidates_are_short_and_a_seed_decides_them() -> None:
    first = list(islice(plain.drafts(plain.problems("cpp"), "cpp", 0), 40))
    assert first == list(islice(plain.drafts(plain.problems("cpp"), "cpp", 0), 40))
    assert {bool(draft.flaw) for draft in first} == {True, False}
    assert max(len(draft.code.splitlines()) for draft in first) < 80
