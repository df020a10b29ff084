#!/usr/bin/env bash
# From an autoregressive model to block diffusion: trains a small AR model (Megatron's own, 2 data-parallel
# ranks), converts it and goes on with CSBP on 2 ranks, trains the same block diffusion model from scratch for
# as many steps as both together, and ends with a table of the bounds. Data as scripts/quickstart.sh prepares
# them. On two or more GPUs it uses two; else it runs on the CPU. Replaces runs/quickstart_conversion.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/environment.sh
begin=$SECONDS
python=.venv/bin/python
runs=runs/quickstart_conversion
data=data/quickstart/python
ar_steps=300   # configs/conversion_ar.yaml
steps=200      # configs/conversion.yaml
say() { echo "quickstart_conversion: $* [$((SECONDS - begin)) s]"; }

gpus=$(nvidia-smi --list-gpus 2> /dev/null | grep -c . || true)
if [ "$gpus" -lt 2 ]; then export CUDA_VISIBLE_DEVICES=""; fi
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 TORCHDYNAMO_DISABLE=1
export PYTHONWARNINGS=ignore

# run NAME CONFIG FLAGS...: its own output goes to a log; the last lines are shown if it fails.
run() {
  local log=$runs/$1.log config=$2
  shift 2
  if ! .venv/bin/torchrun --standalone --nproc-per-node 2 pretrain_bdlm.py "$config" "$@" \
    > "$log" 2>&1; then
    tail -n 40 "$log" >&2
    say "FAILED: see $log" >&2
    exit 1
  fi
  grep -hE 'iteration +[0-9]*00/|(validation|test) at|megatron_bp: (a new|conv)' "$log" |
    sed -E 's/ \| (elapsed|consumed|number|global batch|loss scale|peak memory|balance)[^|]*//g' | uniq
}

rm -rf "$runs"
mkdir -p "$runs"
if [ ! -f "$data.idx" ]; then
  say "preparing data"
  stdlib=$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
  "$python" -m megatron_bp.tools.prepare --input "$stdlib" --suffix .py \
    --exclude site-packages --max-bytes 8000000 --output-prefix "$data" 2> "$runs/prepare.log" ||
    { cat "$runs/prepare.log" >&2; exit 1; }
fi
say "training the autoregressive model: $ar_steps steps"
run ar configs/conversion_ar.yaml --train-iters "$ar_steps" --save "$runs/ar"
say "its bound as it is converted, before any step"
run step0 configs/conversion.yaml --pretrained-checkpoint "$runs/ar" --skip-train \
  --metrics-file "$runs/converted/metrics.jsonl"
say "converted: $steps steps of block diffusion"
run converted configs/conversion.yaml --pretrained-checkpoint "$runs/ar" \
  --train-iters "$steps" --eval-interval "$steps" --save "$runs/converted"
say "from scratch: $((steps + ar_steps)) steps of block diffusion"
run scratch configs/conversion.yaml --train-iters $((steps + ar_steps)) \
  --eval-interval "$steps" --save "$runs/scratch"
say "done"
"$python" -m megatron_bp.tools.summary "$runs/converted" "$runs/scratch" --data "$data" --bounds
