#!/usr/bin/env bash
# Two hosts on this machine, as network namespaces joined by a link whose rate is limited: steps of each form of
# attention's communication, and CSBP against the best CP form trained for the same time. Needs root, ip and tc; makes
# and removes all of it itself. two_hosts.{json,md,png,svg} go to runs/bench_two_hosts, or to the folder in OUT, where
# two_hosts.md keeps its own text around the tables. Flags go to the tool:
#   scripts/bench_two_hosts.sh --repeats 1 --curve-seconds 0
#   OUT=docs/benchmarks scripts/bench_two_hosts.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=bench_two_hosts runs=runs/bench_two_hosts
out=${OUT:-$runs}
PATH=$PATH:/usr/sbin:/sbin
hosts=("mbp$$a" "mbp$$b") link=mbplink addresses=(10.177.0.1 10.177.0.2)
made=() child=""

refuse() {
  echo "$name: $*; nothing was run" >&2
  exit 2
}
# The link goes with its ends. What still runs inside is this script's own.
remove() {
  local code=$? host pid
  trap - EXIT INT TERM HUP
  if [ -n "$child" ]; then
    kill -TERM "$child" 2> /dev/null || true
    wait "$child" 2> /dev/null || true
  fi
  for host in "${made[@]}"; do
    for pid in $(ip netns pids "$host" 2> /dev/null); do kill -KILL "$pid" 2> /dev/null || true; done
    ip netns del "$host" || echo "$name: could not remove the namespace $host: ip netns del $host" >&2
  done
  exit "$code"
}

[ "$(id -u)" -eq 0 ] || refuse "network namespaces need root"
for tool in ip tc; do command -v "$tool" > /dev/null || refuse "there is no $tool here (package iproute2)"; done
trap remove EXIT
trap 'echo "$name: interrupted" >&2; exit 130' INT TERM HUP
for host in "${hosts[@]}"; do
  ip netns add "$host" || refuse "this machine does not allow network namespaces (ip netns add, above)"
  made+=("$host")
done
# Frames of 9000 bytes: headers are 1 % of what is sent and not 5.
ip link add "$link" mtu 9000 netns "${hosts[0]}" type veth peer name "$link" mtu 9000 netns "${hosts[1]}" ||
  refuse "this machine does not allow a link between two namespaces (ip link add, above)"
for i in 0 1; do
  at=(ip netns exec "${hosts[i]}")
  { "${at[@]}" ip addr add "${addresses[i]}/24" dev "$link" &&
    "${at[@]}" ip link set lo up && "${at[@]}" ip link set "$link" up; } ||
    refuse "the link's ends could not be set up (above)"
  { "${at[@]}" tc qdisc add dev "$link" root tbf rate 50mbit burst 32kb latency 400ms &&
    "${at[@]}" tc qdisc del dev "$link" root; } ||
    refuse "this machine does not limit the rate of a link (tc, above): the kernel's sch_tbf is needed"
done

. scripts/quickstart_lib.sh
mkdir -p "$runs" "$out"
prepare_python
say "steps of each form"
# In the background, so that a signal to this script is acted on at once.
"$python" -m megatron_bp.tools.bench hosts --namespaces "${hosts[@]}" --interface "$link" \
  --addresses "${addresses[@]}" --folder "$runs/steps" --json "$out/two_hosts.json" "$@" &
child=$!
wait "$child" || { child="" && exit 1; }
child=""
"$python" -m megatron_bp.tools.bench.two_hosts.page "$out/two_hosts.json" "$out/two_hosts.md"
if [[ " $* " == *" --curve-seconds 0 "* ]]; then
  say "no curve, no picture"
elif "$python" -c 'import matplotlib' 2> /dev/null; then
  "$python" -m megatron_bp.tools.bench.two_hosts.picture "$out/two_hosts.json" "$out/two_hosts"
else
  say 'no picture: matplotlib is missing (.venv/bin/pip install -e ".[plot]"), then:' \
    "$python -m megatron_bp.tools.bench.two_hosts.picture $out/two_hosts.json $out/two_hosts"
fi
say "done: $out/two_hosts.json"
