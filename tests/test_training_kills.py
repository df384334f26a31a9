"""A training run survives kill -9: of the trainer at any moment, and of what evaluates for it.

Moments are drawn; `PKB_SEED`, which a failing test prints, draws the same ones again.
Not here: kills during single evaluations (`test_kills`).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from victims import PARTS, of_owner, still_there

import problems
from pkb_env.store import Store
from rewards.verdict import Status
from training.settings import last_checkpoint

ROOT = Path(__file__).resolve().parent.parent
SEED = int(os.environ.get("PKB_SEED") or secrets.randbits(32))
STEPS, SAMPLES, PATIENCE_S, GONE_S = 6, 4, 120.0, 10.0
GOOD = problems.reference_source(problems.load("allreduce"))
START = """
import secrets, sys
from training import grpo
from training.rewarding import KernelReward

honest, good = KernelReward.evaluate, sys.argv.pop(1)

def written(self, prompts, texts, *rest):
    return honest(self, prompts, [f"{good}# {secrets.token_hex(8)}" for _ in texts], *rest)

KernelReward.evaluate = written
grpo.main(sys.argv[1:])
"""
"""What the random model writes is no code and would start no process: a correct candidate, new each time, takes its place."""


def drawn(*what: object) -> random.Random:
    return random.Random(f"{SEED} {what}")  # noqa: S311  moments, not secrets


def training(folder: Path) -> subprocess.Popen[str]:
    """The command, started once more in `folder`."""
    command = f"""--model_name_or_path {folder}/model --output_dir {folder}/out --store {folder}/s.db
        --problems allreduce --size tiny --pairs 0 --trials 1 --num_generations {SAMPLES} --max_completion_length 16
        --save_steps 1 --run_name r --max_steps {STEPS} --use_cpu true --bf16 false --gradient_checkpointing false
        --disable_tqdm true --report_to none --per_device_train_batch_size {SAMPLES}"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    null = subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", START, GOOD, *command.split()],
        cwd=ROOT, env=environment, text=True, stdout=null, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a random model in it."""
    pytest.importorskip("trl")
    row = json.dumps({"prompt": "Write allreduce.", "completion": f"```python\n{GOOD}```"})
    (tmp_path / "rows.jsonl").write_text(f"{row}\n" * 2, encoding="utf-8")
    command = [sys.executable, "-m", "training.tiny", str(tmp_path / "model"), str(tmp_path / "rows.jsonl")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    print(f"PKB_SEED={SEED}")
    return tmp_path


def saved(folder: Path) -> int:
    return len(list((folder / "out").glob("checkpoint-*")))


def await_checkpoint(run: subprocess.Popen[str], folder: Path, more_than: int) -> None:
    """Wait until the run has saved one more."""
    end = time.monotonic() + PATIENCE_S
    while saved(folder) <= more_than and run.poll() is None and time.monotonic() < end:
        time.sleep(0.01)


def check_end(run: subprocess.Popen[str], folder: Path) -> None:
    """The run ends by itself; every rollout is there once, and nothing of it lives on."""
    _, said = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, said[-3000:]
    assert still_there(of_owner(run.pid), GONE_S) == []
    with contextlib.closing(Store(folder / "s.db")) as store:
        graded = store.graded("r")
    places = [(r.step, r.group, r.turn, r.sample) for r, _ in graded]
    assert sorted(places) == [(step, 0, 0, sample) for step in range(STEPS) for sample in range(SAMPLES)]
    assert {v.status for _, v in graded if v is not None} == {Status.CORRECT}


@pytest.mark.slow
def test_a_trainer_that_is_killed_at_any_moment_goes_on(folder: Path) -> None:
    for number in range(2):
        run = training(folder)
        await_checkpoint(run, folder, saved(folder))
        time.sleep(drawn("trainer", number).uniform(0, 0.3))
        below = of_owner(run.pid)
        run.kill()
        run.communicate()
        assert still_there([*below, *of_owner(run.pid)], GONE_S) == []
    before = saved(folder)
    check_end(training(folder), folder)
    assert before > 0, "no run was killed after a checkpoint"


@pytest.mark.slow
@pytest.mark.parametrize("part", ["zygote", "rank"])
def test_what_evaluates_for_a_trainer_may_be_killed(folder: Path, part: str) -> None:
    run, killed, moment = training(folder), 0, drawn(part)
    end = time.monotonic() + PATIENCE_S
    while run.poll() is None and killed < 2 and time.monotonic() < end:
        if there := PARTS[part](run.pid):
            time.sleep(moment.uniform(0, 0.05))
            with contextlib.suppress(ProcessLookupError):
                os.kill(moment.choice(there), signal.SIGKILL)
                killed += 1
            time.sleep(moment.uniform(0, 0.5))
        time.sleep(0.005)
    assert killed
    check_end(run, folder)


@pytest.mark.parametrize("state", [None, "", '{"global_step": '])
def test_a_checkpoint_that_was_not_finished_is_passed_over(tmp_path: Path, state: str | None) -> None:
    assert last_checkpoint(str(tmp_path / "none")) is None
    for step, text in ((9, '{"global_step": 9}'), (10, state)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if text is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(text, encoding="ascii")
    assert last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-9")
