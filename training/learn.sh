# What run_cpu.sh and run_1gpu.sh share: verified data, a tiny model, SFT, GRPO, more SFT, a table.  Sourced; they set the variables.
set -euo pipefail
export OMP_NUM_THREADS=1 WANDB_MODE=offline WANDB_SILENT=true HF_HUB_OFFLINE=1 TQDM_DISABLE=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT_DIR"
export WANDB_DIR="$OUT_DIR" PYTHONWARNINGS=ignore
start=$SECONDS
KERNELS=(--backend "$BACKEND" --world_size "$WORLD" --topology "$TOPOLOGY" --prompt short --pairs "$PAIRS" --store "$OUT_DIR/data.db"
         --reward "${REWARD:-default}" "${SHARE[@]}")
quiet=(--disable_tqdm true --save_strategy no --logging_steps 5 --seed "$SEED")

# shellcheck disable=SC2086
"$PYTHON" -m training.verified --out "$OUT_DIR/data.db" --problems $PROBLEMS $HELD_OUT -n "$CANDIDATES" --backend "$BACKEND" \
    --world-size "$WORLD" --pairs "$PAIRS" --style plain --prompt short --seed "$SEED" > "$OUT_DIR/verified.txt"
"$PYTHON" -m pkb_env.cli export "$OUT_DIR/data.db" "$OUT_DIR/rows.jsonl" --run verified
"$PYTHON" -m pkb_env.cli export "$OUT_DIR/data.db" "$OUT_DIR/correct.jsonl" --run verified --only correct
MODEL=${MODEL:-}
if [ -z "$MODEL" ]; then
  MODEL=$OUT_DIR/model
  "$PYTHON" -m training.tiny "$MODEL" "$OUT_DIR/rows.jsonl" --lines
fi
echo "SFT on all candidates, right and wrong: the policy before"
"$PYTHON" -m training.sft --rows "$OUT_DIR/rows.jsonl" --model_name_or_path "$MODEL" --output_dir "$OUT_DIR/sft" --max_steps "$SFT_STEPS" \
    --per_device_train_batch_size 16 --learning_rate "$SFT_RATE" "${quiet[@]}" "${DEVICE[@]}" > "$OUT_DIR/sft.txt"
echo "GRPO on $PROBLEMS"
grpo=$SECONDS
# shellcheck disable=SC2086
"$PYTHON" -m training.grpo --problems $PROBLEMS "${KERNELS[@]}" --model_name_or_path "$OUT_DIR/sft" --output_dir "$OUT_DIR/grpo" \
    --max_steps "$GRPO_STEPS" --num_generations 8 --per_device_train_batch_size "$BATCH" --learning_rate "$GRPO_RATE" --beta "$BETA" \
    --run_name grpo --log_completions true --num_completions_to_print 0 --max_completion_length "$TOKENS" --report_to wandb "${quiet[@]}" "${DEVICE[@]}" > "$OUT_DIR/grpo.txt"
grpo=$((SECONDS - grpo))
echo "SFT on the correct ones, as many samples as GRPO had: $((GRPO_STEPS * BATCH))"
"$PYTHON" -m training.sft --rows "$OUT_DIR/correct.jsonl" --model_name_or_path "$OUT_DIR/sft" --output_dir "$OUT_DIR/more" \
    --max_steps "$((GRPO_STEPS * BATCH / 16))" --per_device_train_batch_size 16 --learning_rate "$SFT_RATE" "${quiet[@]}" "${DEVICE[@]}" \
    > "$OUT_DIR/more.txt"
for names in "$HELD_OUT" "$PROBLEMS"; do
  # shellcheck disable=SC2086
  "$PYTHON" -m training.compare --models "SFT=$OUT_DIR/sft" "SFT on correct=$OUT_DIR/more" "GRPO=$OUT_DIR/grpo" --problems $names \
      "${KERNELS[@]}" --samples "$SAMPLES" --max_new_tokens "$TOKENS" --seed "$SEED"
done | tee "$OUT_DIR/table.txt"
echo "held out from GRPO, but not from SFT: $HELD_OUT"
grep -o '^[0-9]* compiler runs.*' "$OUT_DIR/grpo.txt" || true
echo "GRPO: $grpo s, with start and end; wandb: $(ls -d "$OUT_DIR"/wandb/offline-run-* | tail -1)"
echo "$(((SECONDS - start) / 60)) min $(((SECONDS - start) % 60)) s in all; everything is in $OUT_DIR"
