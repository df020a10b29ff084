#!/usr/bin/env bash
# Every check that needs no GPU: the environment, static checks, then tests, cheapest tier first.
# Arguments go to pytest; a path among them (tests/unit/test_x.py) replaces the tiers.
# As many tests run at once as there are cores, 4 at most; of ranks and real runs too, which wait for much. Tests of
# a file of real runs stay together, since they share runs.
#   scripts/test.sh -k blocks
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

begin=$SECONDS
scripts/environment.sh || exit 1
export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1
export PATH="$PWD/.venv/bin:$PATH"

passed=() failed=() empty=()
# Args: a name, then the command whose exit code counts. 5 is pytest's "no tests selected".
check() {
  local name=$1 code=0 start=$SECONDS
  shift
  echo "== $name"
  "$@" || code=$?
  case $code in
    0) passed+=("$name $((SECONDS - start)) s") ;;
    5) empty+=("$name") ;;
    *) failed+=("$name") ;;
  esac
}
trap 'echo "test.sh: interrupted"; exit 130' INT
join() {
  local all
  all=$(printf ', %s' "$@")
  echo "${all:2}"
}

typed=(megatron_bp)
[ -f pretrain_bdlm.py ] && typed+=(pretrain_bdlm.py)
check "ruff check" ruff check
check "ruff format" ruff format --check
check mypy mypy "${typed[@]}"
check codespell codespell

tiers=(tests/unit tests/ranks tests/e2e)
for argument in "$@"; do
  if [ -e "${argument%%::*}" ]; then tiers=(""); fi
done
ran=0
for tier in "${tiers[@]}"; do
  if [ -n "$tier" ] && [ ! -d "$tier" ]; then continue; fi
  before=${#empty[@]} workers=() dist=worksteal
  [ "$tier" = tests/e2e ] && dist=loadfile
  [ -n "$tier" ] && workers=(-n logical --maxprocesses 4 --dist "$dist")
  check "${tier:-pytest}" python -m pytest ${tier:+"$tier"} "${workers[@]}" "$@"
  [ "${#empty[@]}" -eq "$before" ] && ran=1
done
[ "$ran" -eq 1 ] || failed+=("pytest: no test was selected")

if [ "${#failed[@]}" -gt 0 ]; then
  echo "test.sh: FAILED after $((SECONDS - begin)) s: $(join "${failed[@]}")"
  exit 1
fi
echo "test.sh: ok after $((SECONDS - begin)) s: $(join "${passed[@]}")"
