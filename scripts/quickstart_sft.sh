#!/usr/bin/env bash
# Supervised fine-tuning: chats cut from Python's own standard library (signature and docstring, answered by the
# body), the model of scripts/quickstart.sh (trained first if runs/quickstart has no finished checkpoint), its
# bound on held-out answers, CSBP training on 2 ranks, the bound again on the same rows and noise, and a
# short table. On two or more GPUs it uses two; else it runs on the CPU. Replaces runs/quickstart_sft.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/environment.sh
begin=$SECONDS
python=.venv/bin/python
base=runs/quickstart
run=runs/quickstart_sft
data=data/quickstart_sft/functions
say() { echo "quickstart_sft: $* [$((SECONDS - begin)) s]"; }

gpus=$(nvidia-smi --list-gpus 2> /dev/null | grep -c . || true)
if [ "$gpus" -lt 2 ]; then export CUDA_VISIBLE_DEVICES=""; fi
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 TORCHDYNAMO_DISABLE=1
export PYTHONWARNINGS=ignore

# step NAME FLAGS...: its own output goes to a log; the last lines are shown if it fails.
step() {
  local log=$run/$1.log
  shift
  if ! .venv/bin/torchrun --standalone --nproc-per-node 2 pretrain_bdlm.py \
    configs/sft_quickstart.yaml --pretrained-checkpoint "$base" "$@" > "$log" 2>&1; then
    tail -n 40 "$log" >&2
    say "FAILED: see $log" >&2
    exit 1
  fi
  grep -hE 'iteration +[0-9]+/|(validation|test) at|validation loss|megatron_bp: a new' "$log" |
    sed -E 's/ \| (elapsed|consumed|number|global batch|loss scale|peak memory|balance)[^|]*//g'
}

steps=$(sed -nE 's/^ *train_iters: *([0-9]+).*/\1/p' configs/quickstart.yaml)
finished() {
  [ -f "$base/config.yaml" ] && [ -f "$base/iter_$(printf %07d "$steps")/.metadata" ] &&
    [ "$(cat "$base/latest_checkpointed_iteration.txt")" = "$steps" ]
}
if ! finished; then
  say "$base has no finished checkpoint: running scripts/quickstart.sh first"
  scripts/quickstart.sh
fi

rm -rf "$run"
mkdir -p "$run"
say "making chats"
"$python" -m megatron_bp.tools.function_pairs --output "$data.jsonl" --max-bytes 500
"$python" -m megatron_bp.tools.prepare --format chats --input "$data.jsonl" --output-prefix "$data" \
  --chat-template configs/templates/plain.jinja --overwrite > "$run/prepare.log" 2>&1 ||
  { cat "$run/prepare.log" >&2; exit 1; }
say "the bound on held-out answers, before any step"
step before --skip-train --metrics-file "$run/before.jsonl"
say "training on answers"
step train --save "$run" --load "$run"
say "done: checkpoints and metrics.jsonl are in $run"
"$python" -m megatron_bp.tools.sft_summary "$run"
