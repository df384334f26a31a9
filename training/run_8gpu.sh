#!/usr/bin/env bash
# NOT RUN.  The same with eight ranks on eight GPUs; the model is trained on the first of them while they wait.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-.venv/bin/python} OUT_DIR=${OUT_DIR:-$(mktemp -d)} MODEL=${1:-}
BACKEND=cuda WORLD=8 TOPOLOGY=node PAIRS=${PAIRS:-96}
PROBLEMS="allreduce gemm_allreduce" HELD_OUT="allgather"
CANDIDATES=${CANDIDATES:-96} SFT_STEPS=${SFT_STEPS:-800} SFT_RATE=${SFT_RATE:-2e-3} GRPO_STEPS=${GRPO_STEPS:-40} GRPO_RATE=${GRPO_RATE:-1.5e-4}
BETA=${BETA:-0.1} SEED=${SEED:-0}
BATCH=32 SAMPLES=${SAMPLES:-64} TOKENS=256
SHARE=(--share_device true) DEVICE=(--bf16 false --gradient_checkpointing false)
if [ -n "$MODEL" ]; then DEVICE+=(--use_peft true --lora_target_modules all-linear) TOKENS=2048; fi
. training/learn.sh
