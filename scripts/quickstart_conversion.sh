#!/usr/bin/env bash
# From an autoregressive model to block diffusion: trains a small AR model (Megatron's own, 2 data-parallel
# ranks), converts it and goes on with CSBP on 2 ranks, trains the same block diffusion model from scratch for
# as many steps as both together, and ends with a table of the bounds. Data as scripts/quickstart.sh prepares
# them. On two or more GPUs it uses two; else it runs on the CPU. Replaces runs/quickstart_conversion.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=quickstart_conversion runs=runs/quickstart_conversion
. scripts/quickstart_lib.sh
ar_steps=300   # configs/conversion_ar.yaml
steps=200      # configs/conversion.yaml
shown='iteration +[0-9]*00/'

rm -rf "$runs"
mkdir -p "$runs"
prepare_python
say "training the autoregressive model: $ar_steps steps"
train ar configs/conversion_ar.yaml --train-iters "$ar_steps" --save "$runs/ar"
say "its bound as it is converted, before any step"
train step0 configs/conversion.yaml --pretrained-checkpoint "$runs/ar" --skip-train \
  --metrics-file "$runs/converted/metrics.jsonl"
say "converted: $steps steps of block diffusion"
train converted configs/conversion.yaml --pretrained-checkpoint "$runs/ar" \
  --train-iters "$steps" --eval-interval "$steps" --save "$runs/converted"
say "from scratch: $((steps + ar_steps)) steps of block diffusion"
train scratch configs/conversion.yaml --train-iters $((steps + ar_steps)) \
  --eval-interval "$steps" --save "$runs/scratch"
say "done"
"$python" -m megatron_bp.tools.summary "$runs/converted" "$runs/scratch" --data "$pydata" --bounds
