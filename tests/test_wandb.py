"""What a GRPO run gives wandb, offline and without an account; skipped where wandb is not installed.

Not here: what the figures mean (`test_training`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import problems

ROOT = Path(__file__).resolve().parent.parent
GOOD = problems.reference_source(problems.load("allreduce"))
CURVES = (
    "train/reward", "train/kernels/invalid", "train/kernels/unscored", "train/kernels/fast_1", "train/kernels/duplicates",
    "train/kernels/evaluation_s", "train/kernels/wait_s", "train/kernels/queue_depth", "train/terms/status_floor",
)  # fmt: skip
SCRIPT = """
import sys
from pathlib import Path
from training import grpo, tiny

folder = Path(sys.argv[1])
tiny.write(folder / "model", [sys.argv[2]] * 2, hidden=32, layers=1)
grpo.main([
    "--model_name_or_path", f"{folder}/model", "--output_dir", f"{folder}/out", "--store", f"{folder}/s.db", "--problems",
    "allreduce", "--size", "tiny", "--pairs", "0", "--trials", "1", "--num_generations", "2",
    "--per_device_train_batch_size", "2", "--max_completion_length", "8", "--max_steps", "2", "--logging_steps", "1",
    "--save_strategy", "no", "--use_cpu", "true", "--bf16", "false", "--gradient_checkpointing", "false", "--report_to",
    "wandb", "--log_completions", "true", "--num_completions_to_print", "0", "--run_name", "r",
])
"""


def test_curves_and_completions_are_in_an_offline_run(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("wandb")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path), GOOD]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (record,) = run.glob("*.wandb")
    missing = [name for name in CURVES if name.encode() not in record.read_bytes()]
    assert missing == []
    tables = [json.loads(path.read_text()) for path in (run / "files" / "media" / "table").glob("*.json")]
    assert tables
    assert all({"prompt", "completion", "status", "speedup", "message", "advantage"} <= set(table["columns"]) for table in tables)
    assert {row[table["columns"].index("status")] for table in tables for row in table["data"]} == {"INVALID"}
