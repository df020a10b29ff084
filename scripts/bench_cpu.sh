#!/usr/bin/env bash
# All benchmark tables that need no GPU and no second host, into the pages of docs/benchmarks, and their JSON beside
# them. Takes about 40 minutes on two cores, which should have nothing else to do. With names, only these tables:
#   scripts/bench_cpu.sh attention step
# Tables: attention, long, step, ranks, memory_32k, memory_64k, exchange, exchange_slow. The last one needs root: its
# ranks talk over a loopback of their own (a network namespace) that lets 200 Mbit/s through; otherwise it is left out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/environment.sh
export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
pages=docs/benchmarks
tables=(attention long step ranks memory_32k memory_64k exchange exchange_slow)
wanted=("$@")
[ $# -gt 0 ] || wanted=("${tables[@]}")
log=$(mktemp)
trap 'rm -f "$log"' EXIT

before=() # what the benchmark is started by
say() { echo "bench_cpu: $*"; }
# bench TABLE PAGE SUBCOMMAND FLAG ...
bench() {
  local table=$1 page=$2 name
  shift 2
  for name in "${wanted[@]}"; do
    [ "$name" = "$table" ] || continue
    say "$table: $*"
    "${before[@]}" .venv/bin/python -m megatron_bp.tools.bench "$@" --json "$pages/$table.json" --page "$pages/$page.md" "$table" \
      2> "$log" || { tail -5 "$log" >&2; exit 1; }
  done
}

for name in "${wanted[@]}"; do
  case " ${tables[*]} " in
    *" $name "*) ;;
    *) say "no table $name; there are ${tables[*]}" >&2; exit 2 ;;
  esac
done

bench attention attention attention
bench long attention attention --length 16384 65536 --kernels sdpa --baselines --backward-only --repeats 1
bench step step step --repeats 5
bench ranks step step --ranks 4 --length 8192
same=(--forms csbp:all_gather cp:all_gather cp:clean_all_gather csbp:ring cp:p2p --heads 2 --key-heads 1 --repeats 1)
bench memory_32k step step --ranks 4 --length 32768 "${same[@]}"
bench memory_64k step step --ranks 4 --length 65536 --layers 1 "${same[@]}"
bench exchange exchange exchange --ranks 4
if [ "$(id -u)" = 0 ] && unshare --net true 2> "$log" && command -v tc > /dev/null; then
  # shellcheck disable=SC2016  # expanded in the namespace
  before=(unshare --net bash -ec 'ip link set lo up
    tc qdisc replace dev lo root tbf rate 200mbit burst 256kb latency 2s
    exec "$@"' -)
  bench exchange_slow exchange exchange --ranks 4 --length 4096
else
  say "exchange_slow is left out: it needs root, unshare and tc"
fi
say "done: see $pages"
