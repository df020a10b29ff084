#!/usr/bin/env bash
# Supervised fine-tuning: chats cut from Python's own standard library (signature and docstring, answered by the
# body), the model of scripts/quickstart.sh (trained first if runs/quickstart has no finished checkpoint), its
# bound on held-out answers, CSBP training on 2 ranks, the bound again on the same rows and noise, and a
# short table. On two or more GPUs it uses two; else it runs on the CPU. Replaces runs/quickstart_sft.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=quickstart_sft runs=runs/quickstart_sft
. scripts/quickstart_lib.sh
base=runs/quickstart
data=data/quickstart_sft/functions
config=(configs/sft_quickstart.yaml --pretrained-checkpoint "$base")

steps=$(sed -nE 's/^ *train_iters: *([0-9]+).*/\1/p' configs/quickstart.yaml)
finished() {
  [ -f "$base/config.yaml" ] && [ -f "$base/iter_$(printf %07d "$steps")/.metadata" ] &&
    [ "$(cat "$base/latest_checkpointed_iteration.txt")" = "$steps" ]
}
if ! finished; then
  say "$base has no finished checkpoint: running scripts/quickstart.sh first"
  scripts/quickstart.sh
fi

rm -rf "$runs"
mkdir -p "$runs"
say "making chats"
"$python" -m megatron_bp.tools.function_pairs --output "$data.jsonl" --max-bytes 500
"$python" -m megatron_bp.tools.prepare --format chats --input "$data.jsonl" --output-prefix "$data" \
  --chat-template configs/templates/plain.jinja --overwrite > "$runs/prepare.log" 2>&1 ||
  { cat "$runs/prepare.log" >&2; exit 1; }
say "the bound on held-out answers, before any step"
train before "${config[@]}" --skip-train --metrics-file "$runs/before.jsonl"
say "training on answers"
train train "${config[@]}" --save "$runs" --load "$runs"
say "done: checkpoints and metrics.jsonl are in $runs"
"$python" -m megatron_bp.tools.sft_summary "$runs"
