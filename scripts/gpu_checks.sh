#!/usr/bin/env bash
# What a GPU is needed to check, in a few minutes: the environment, tests/gpu, and attention side by side.
# Reports go to the folder given, or to $OUT. PYTHON names another Python than .venv's; without
# Megatron-core the tests of whole runs are skipped.
#   scripts/gpu_checks.sh runs/gpu
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

out=${1:-${OUT:?gpu_checks.sh: give a folder for the reports, as in: scripts/gpu_checks.sh runs/gpu}}
python=${PYTHON:-.venv/bin/python}
if ! command -v "$python" > /dev/null; then
  echo "gpu_checks.sh: no $python; run scripts/environment.sh, or name one: PYTHON=python3 $0 $out" >&2
  exit 1
fi
mkdir -p "$out" || exit 1
unset TORCHDYNAMO_DISABLE # without its compiler FlexAttention is no kernel
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

failed=()
# check NAME COMMAND...: its output also goes to $out/NAME.log.
check() {
  local name=$1
  shift
  echo "== $name"
  "$@" 2>&1 | tee "$out/$name.log" || failed+=("$name")
}

check environment "$python" -c '
import torch
assert torch.cuda.is_available(), "torch sees no CUDA device"
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}")
print(f"compute capability {torch.cuda.get_device_capability()}")
'
if [ "${#failed[@]}" -gt 0 ]; then exit 1; fi
check tests timeout "${TESTS_SECONDS:-300}" "$python" -m pytest -q --no-showlocals -m gpu tests/gpu \
  --durations 10 --junit-xml "$out/tests.xml"
for length in ${LENGTHS:-16384 65536}; do
  check "attention_$length" timeout "${BENCH_SECONDS:-120}" "$python" -m megatron_bp.tools.bench attention \
    --device cuda --dtype bfloat16 --kernels flash flex --length "$length" --heads 32 --key-heads 8 \
    --head-dim 128 --json "$out/attention_$length.json"
done

if [ "${#failed[@]}" -gt 0 ]; then
  echo "gpu_checks.sh: FAILED: ${failed[*]}; reports are in $out"
  exit 1
fi
echo "gpu_checks.sh: ok; reports are in $out"
