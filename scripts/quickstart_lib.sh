# Sourced by the quickstarts, in the project's root, with the quickstart's name in `name` and the folder of its
# runs and logs in `runs`. Makes the environment; `say`, `prepare_python` and `train` are its parts in common.
# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154  # python, pydata and more are for who sources it; name, runs are from there

scripts/environment.sh
begin=$SECONDS
python=.venv/bin/python
pydata=data/quickstart/python
say() { echo "$name: $* [$((SECONDS - begin)) s]"; }

gpus=$(nvidia-smi --list-gpus 2> /dev/null | grep -c . || true)
if [ "$gpus" -lt 2 ]; then export CUDA_VISIBLE_DEVICES=""; fi
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 TORCHDYNAMO_DISABLE=1
export PYTHONWARNINGS=ignore

# Python's own standard library, byte by byte, as $pydata.
prepare_python() {
  if [ -f "$pydata.idx" ]; then return; fi
  say "preparing data"
  local stdlib
  stdlib=$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
  "$python" -m megatron_bp.tools.prepare --input "$stdlib" --suffix .py \
    --exclude site-packages --max-bytes 8000000 --output-prefix "$pydata" 2> "$runs/prepare.log" ||
    { cat "$runs/prepare.log" >&2; exit 1; }
}

# train LOG CONFIG FLAGS...: on two ranks. Its own output goes to $runs/LOG.log; what of it is short is
# shown, and the last lines if it fails.
train() {
  local log=$runs/$1.log
  shift
  if ! .venv/bin/torchrun --standalone --nproc-per-node 2 pretrain_bdlm.py "$@" > "$log" 2>&1; then
    tail -n 40 "$log" >&2
    say "FAILED: see $log" >&2
    exit 1
  fi
  grep -hE "${shown:-iteration +[0-9]+/}|(validation|test) at|megatron_bp: (a new|conv)|successfully (saved|loaded)" "$log" |
    sed -E 's/ \| (elapsed|consumed|number|global batch|loss scale|peak memory|balance)[^|]*//g'
}
