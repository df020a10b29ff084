#!/usr/bin/env bash
# Makes an environment of its own with Transformer Engine, for tests/te; needs no GPU and no CUDA toolkit.
# Quick when there is nothing to do, and goes on where it was interrupted.
#   scripts/te_environment.sh [FOLDER]      (default: .venv-te)
# Transformer Engine's PyTorch part is on package indexes as source alone: 33 C++ files, which each read torch's
# headers for half a minute. They are compiled as one file, in a few minutes on one core and 3 GB of memory. Its
# headers and libraries of CUDA are those that torch's wheel brings, and CUDA's compiler is not needed.
# Megatron is left out of it: with Transformer Engine there, the layers of its local spec fail without a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

te=2.20.2    # compared with torch's collectives by tests/te
torch=2.13.0 # a CUDA 13.0 build
cuda=13.0    # headers that torch's wheel does not bring

say() { echo "te_environment: $*"; }
fail() {
  say "$*" >&2
  exit 1
}
if [ $# -gt 1 ] || [[ ${1:-} == -* ]]; then fail "usage: scripts/te_environment.sh [FOLDER]"; fi
mkdir -p "${1:-.venv-te}"
folder=$(cd "${1:-.venv-te}" && pwd)
python=$folder/bin/python wheels=$folder/wheels-torch$torch
stamp=$folder/megatron_bp.stamp log=$folder/install.log
if [ "$folder" = "$PWD/.venv" ]; then
  fail ".venv is the project's own environment, whose Megatron Transformer Engine would break: give another folder"
fi

tests() {
  say "run the tests with"
  echo "    $python -m pytest tests/te"
}
# A venv cannot be moved: its folder is part of the stamp.
wanted="$folder transformer-engine $te torch $torch"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && "$python" -I -c "" 2> /dev/null; then
  say "up to date"
  tests
  exit 0
fi

if [ "$(uname -s)" != Linux ]; then
  fail "this is $(uname -s): Transformer Engine's libraries are for Linux alone"
fi
compiler=${CXX:-c++}
if ! command -v "$compiler" > /dev/null; then
  fail "no C++ compiler ($compiler): apt-get install g++, or set CXX to the path of one"
fi
base=$(scripts/python.sh)
header=$("$base" -I -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")')
if [ ! -f "$header" ]; then
  fail "no $header: apt-get install python3-dev of that version, or set PYTHON to one that has its headers"
fi
free=$(df -Pk "$folder" | awk 'NR == 2 { print int($4 / 1048576) }')
if [ ! -x "$python" ] && [ "$free" -lt 9 ]; then
  fail "$free GiB are free in $folder, and 9 are needed: name a folder elsewhere"
fi
exec 9> "$folder/lock"
if ! "$base" -I -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2> /dev/null; then
  fail "another te_environment.sh is at work in $folder, or its disk has no file locks"
fi

begin=$SECONDS
# Args: what it does, then a command. Its output goes to the log; the end of it is shown if it fails.
step() {
  say "$1 [$((SECONDS - begin)) s] (log: $log)"
  shift
  if ! "$@" >> "$log" 2>&1; then
    tail -n 20 "$log" >&2
    fail "FAILED: all output is in $log; run it again to go on"
  fi
}
pip() { "$python" -m pip "$@"; }

if ! "$python" -I -m pip --version > /dev/null 2>&1 ||
  { [ -f "$stamp" ] && [[ "$(cat "$stamp")" != "$folder "* ]]; }; then
  say "making $folder with $("$base" -V)"
  "$base" -I -m venv --clear "$folder"
fi
rm -f "$stamp"
: > "$log"

step "installing torch $torch and build tools, a minute or two" pip install --progress-bar off \
  "torch==$torch" numpy "pytest>=9" "setuptools>=77" wheel packaging pybind11 ninja \
  "nvidia-cuda-crt==$cuda.*" "nvidia-cuda-cccl==$cuda.*"

# `nvidia` is a folder without a file of its own: it has a path alone.
libraries=$("$python" -I -c 'import nvidia; print(list(nvidia.__path__)[0])')
# NVTE_PYTORCH_FORCE_BUILD: otherwise its setup first tries to fetch a wheel from where no package index is.
# NVTE_NO_LOCAL_VERSION: otherwise the commit of the git tree around it, this project's, gets into its version, and
# no core of that version is found.
# CPLUS_INCLUDE_PATH: nv/target, which the headers of bf16 and FP8 include.
in_environment() {
  env PATH="$folder/bin:$PATH" MAX_JOBS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1 \
    NVTE_NO_LOCAL_VERSION=1 \
    CPLUS_INCLUDE_PATH="$libraries/cu13/include/cccl${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}" "$@"
}
source_of() {
  rm -rf "$folder/source"
  in_environment "$python" -m pip download --progress-bar off --no-deps --no-build-isolation \
    --no-binary transformer-engine-torch --dest "$folder/source" "transformer-engine-torch==$te"
  tar -xzf "$folder/source/transformer_engine_torch-$te.tar.gz" -C "$folder/source"
}
# Its setup compiles whatever is called *.cpp: all of them become headers of one.
as_one_file() {
  local csrc="$folder/source/transformer_engine_torch-$te/csrc" file
  find "$csrc" -name '*.cpp' | LC_ALL=C sort | while read -r file; do
    mv "$file" "${file%.cpp}.inc"
    echo "#include \"${file%.cpp}.inc\""
  done > "$folder/source/all"
  mv "$folder/source/all" "$csrc/all.cpp"
}
built() {
  in_environment "$python" -m pip wheel -v --progress-bar off --no-deps --no-build-isolation --no-cache-dir \
    --wheel-dir "$wheels" "$folder/source/transformer_engine_torch-$te"
}
step "installing Transformer Engine's core $te" pip install --progress-bar off --no-deps \
  "transformer-engine==$te" "transformer-engine-cu13==$te"
if ! compgen -G "$wheels/transformer_engine_torch-$te-*.whl" > /dev/null; then
  step "fetching the source of its PyTorch part" source_of
  as_one_file
  step "compiling it, some minutes" built
fi
step "installing its PyTorch part" pip install --progress-bar off --find-links "$wheels" \
  "torch==$torch" "transformer-engine-torch==$te"

step "importing it" "$python" -I -c '
import torch
from transformer_engine.pytorch.distributed import gather_along_first_dim
print("imported")
'
echo "$wanted" > "$stamp"
say "ready after $((SECONDS - begin)) s: $("$python" -V), torch $torch, Transformer Engine $te in $folder"
tests
