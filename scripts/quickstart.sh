#!/usr/bin/env bash
# From nothing to a trained block diffusion model: environment, data (Python's own standard library, byte
# by byte), CSBP training on 2 ranks, a checkpoint, one resume, evaluation, and a short table.
# On two or more GPUs it uses two; else it runs on the CPU. Replaces runs/quickstart.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=quickstart runs=runs/quickstart
. scripts/quickstart_lib.sh

rm -rf "$runs"
mkdir -p "$runs"
prepare_python
config=(configs/quickstart.yaml --save "$runs" --load "$runs")
say "training: first half"
train first "${config[@]}" --exit-interval 280
say "training: resumed from the checkpoint"
train second "${config[@]}"
say "done: checkpoints and metrics.jsonl are in $runs"
"$python" -m megatron_bp.tools.summary "$runs" --data "$pydata" --at-most 0.87
