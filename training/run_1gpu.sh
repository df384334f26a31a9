#!/usr/bin/env bash
# The same on one GPU, with kernels in CUDA: bash training/run_1gpu.sh [MODEL], default a tiny model of its own; a given one is trained
# with LoRA.  Not run yet.  Variables: PYTHON, OUT_DIR, CANDIDATES, SFT_STEPS, GRPO_STEPS, SAMPLES, LIMIT_S.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${LIMITED:-}" ]; then LIMITED=1 exec timeout "${LIMIT_S:-480}" bash "training/$(basename "$0")" "$@"; fi
PYTHON=${PYTHON:-.venv/bin/python} OUT_DIR=${OUT_DIR:-$(mktemp -d)} MODEL=${1:-}
BACKEND=cuda WORLD=1 TOPOLOGY=node PAIRS=${PAIRS:-96}
PROBLEMS="allreduce gemm_allreduce" HELD_OUT="allgather"
CANDIDATES=${CANDIDATES:-48} SFT_STEPS=${SFT_STEPS:-800} SFT_RATE=${SFT_RATE:-2e-3} GRPO_STEPS=${GRPO_STEPS:-25} GRPO_RATE=${GRPO_RATE:-1.5e-4}
BETA=${BETA:-0.1} SEED=${SEED:-0}
BATCH=32 SAMPLES=${SAMPLES:-32} TOKENS=256
SHARE=(--share_device true) DEVICE=(--bf16 false --gradient_checkpointing false)
if [ -n "$MODEL" ]; then DEVICE+=(--use_peft true --lora_target_modules all-linear) TOKENS=2048; fi
. training/learn.sh
