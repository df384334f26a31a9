#!/usr/bin/env bash
# A policy that learns, on the CPU: bash training/run_cpu.sh, from the root of a checkout with the extras train and log.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-.venv/bin/python} OUT_DIR=${OUT_DIR:-$(mktemp -d)}
BACKEND=cpp WORLD=2 TOPOLOGY=cpu PAIRS=${PAIRS:-96}
PROBLEMS="allgather scatter broadcast allreduce" HELD_OUT="gather reduce"
CANDIDATES=${CANDIDATES:-112} SFT_STEPS=${SFT_STEPS:-800} SFT_RATE=${SFT_RATE:-2e-3} GRPO_STEPS=${GRPO_STEPS:-40} GRPO_RATE=${GRPO_RATE:-1.5e-4}
BETA=${BETA:-0.1} SEED=${SEED:-0}
BATCH=32 SAMPLES=${SAMPLES:-64} TOKENS=160
SHARE=() DEVICE=(--use_cpu true --bf16 false --gradient_checkpointing false)
. training/learn.sh
