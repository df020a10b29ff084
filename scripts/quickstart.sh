#!/usr/bin/env bash
# From nothing to a trained block diffusion model: environment, data (Python's own standard library, byte
# by byte), CSBP training on 2 ranks, a checkpoint, one resume, evaluation, and a short table.
# On two or more GPUs it uses two; else it runs on the CPU. Replaces runs/quickstart.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/environment.sh
begin=$SECONDS
python=.venv/bin/python
run=runs/quickstart
data=data/quickstart/python
say() { echo "quickstart: $* [$((SECONDS - begin)) s]"; }

gpus=$(nvidia-smi --list-gpus 2> /dev/null | grep -c . || true)
if [ "$gpus" -lt 2 ]; then export CUDA_VISIBLE_DEVICES=""; fi
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 TORCHDYNAMO_DISABLE=1
export PYTHONWARNINGS=ignore

# Training's own output goes to a log; its last lines are shown if it fails.
train() {
  local log=$run/$1.log
  shift
  if ! .venv/bin/torchrun --standalone --nproc-per-node 2 pretrain_bdlm.py \
    configs/quickstart.yaml --save "$run" --load "$run" "$@" > "$log" 2>&1; then
    tail -n 40 "$log" >&2
    say "FAILED: see $log" >&2
    exit 1
  fi
  grep -hE 'iteration +[0-9]+/|validation loss|megatron_bp:|successfully (saved|loaded)' "$log" |
    sed -E 's/ \| (elapsed|consumed|number|global batch|loss scale)[^|]*//g'
}

rm -rf "$run"
mkdir -p "$run"
if [ ! -f "$data.idx" ]; then
  say "preparing data"
  stdlib=$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
  "$python" -m megatron_bp.tools.prepare --input "$stdlib" --suffix .py \
    --exclude site-packages --max-bytes 8000000 --output-prefix "$data" 2> "$run/prepare.log" ||
    { cat "$run/prepare.log" >&2; exit 1; }
fi
say "training: first half"
train first --exit-interval 280
say "training: resumed from the checkpoint"
train second
say "done: checkpoints and metrics.jsonl are in $run"
"$python" -m megatron_bp.tools.summary "$run" --data "$data" --at-most 0.87
