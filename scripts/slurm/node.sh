#!/usr/bin/env bash
# What srun starts once on each node: torchrun with this node's ranks. Passes the signal to stop on to them.
#
# Slurm signals the processes that it started itself, and not their children: this shell gets the signal, and
# neither torchrun nor a rank does. torchrun must not get it either: it would pass on SIGTERM alone, and kill
# ranks that have not ended 30 seconds later, in the middle of a long step or a save.
set -euo pipefail

say() { echo "node.sh: $*"; }

# Once to each rank, as soon as it has a handler (bit 9 of the signals that it catches): until then it ignores
# the signal, and while Python ends it would die of a second one. A preflight has none, and goes on to its end.
pass_on() {
  local ranks rank caught
  read -ra ranks <<< "$(cat "/proc/$torchrun/task/"*/children 2> /dev/null | tr '\n' ' ')" # its children
  for rank in "${ranks[@]}"; do
    caught=$(sed -n 's/^SigCgt:[[:space:]]*//p' "/proc/$rank/status" 2> /dev/null) || continue
    if [[ $told != *" $rank "* ]] && (((0x${caught:-0} & 0x200) != 0)); then
      kill -USR1 "$rank" 2> /dev/null || continue
      told+="$rank "
    fi
  done
}

# What the signal makes this shell do, as long as torchrun lives.
stop() {
  if [ -z "$asked" ]; then say "told to stop: every rank ends its step and saves"; fi
  asked=1
  : > "$STOP_MARK"
  while [ -n "$torchrun" ] && kill -0 "$torchrun" 2> /dev/null; do
    pass_on
    sleep 0.5
  done
}

main() {
  local python=${PYTHON:-.venv/bin/python} is_host=false launch code=0
  asked='' torchrun='' told=' '
  trap stop USR1 TERM # TERM too: scancel, and preemption with a grace time

  if [ -n "${SETUP:-}" ]; then
    set +u # module files use what is not set
    # shellcheck source=/dev/null
    . "$SETUP"
    set -u
  fi
  . scripts/slurm/settings.sh
  if ! command -v "$python" > /dev/null; then
    say "error: $SLURMD_NODENAME has no program $python: set PYTHON; a .venv also needs the Python it was made with"
    exit 127
  fi

  if [ "$SLURMD_NODENAME" = "$RDZV_HOST" ]; then is_host=true; fi
  # read_timeout: the first node may be minutes later than others, when it gets a container or wakes a disk.
  # local-addr: the name that Slurm reaches a node by; its own idea of its name may not resolve elsewhere.
  launch=(-m torch.distributed.run --nnodes "$SLURM_NNODES" --nproc-per-node "$RANKS_PER_NODE"
    --rdzv-backend c10d --rdzv-id "$RDZV_ID" --rdzv-endpoint "$RDZV_HOST:$RDZV_PORT"
    --rdzv-conf "is_host=$is_host,read_timeout=600" --local-addr "$SLURMD_NODENAME" --max-restarts 0)
  say "$SLURMD_NODENAME is node $SLURM_NODEID of $SLURM_NNODES, $RANKS_PER_NODE ranks, meeting at $RDZV_HOST:$RDZV_PORT"
  (
    trap '' USR1 # inherited: torchrun ignores it, and a rank does until it has its own handler
    exec "$python" "${launch[@]}" "${PROGRAM:-pretrain_bdlm.py}" "$@"
  ) &
  torchrun=$!
  if [ -n "$asked" ]; then stop; fi # told while there was no torchrun yet

  wait "$torchrun" || code=$?
  if [ -n "$asked" ]; then # which ends the wait, with another code
    code=0
    wait "$torchrun" || code=$?
  fi
  exit "$code"
}

# Read as a whole before the hours in which another version may be checked out; it does not come back.
main "$@"
