#!/usr/bin/env bash
# The body of both batch scripts: starts node.sh on every node, first for a preflight, then for the run; queues
# the job again if it was told to stop, and says who failed if something did. Arguments are those of
# pretrain_bdlm.py. Variables, all optional:
#   SETUP           a file that every node sources first: modules, an environment
#   CONTAINER       words before the command on a node, such as "apptainer exec --nv IMAGE.sif"
#   SRUN_ARGS       more words for srun, such as "--container-image=IMAGE --container-mounts=/data"
#   PYTHON          default .venv/bin/python
#   RANKS_PER_NODE  default: the GPUs of a node that were asked for
#   LOGS            default runs/slurm; every job has a folder in it, and every node two files for each start
#   MAX_RESTARTS    default 100; how often a job is queued again
#   PREFLIGHT_TIMEOUT  default 60; seconds that a collective of the preflight may take
set -euo pipefail

say() { echo "job.sh: $*"; }
fail() {
  say "error: $*" >&2
  exit 2
}

# Refuses what is not of digits alone, which bash would take for 0, for false or for a name.
# Args: what has the value; the value; the least that it may be; the way out.
whole() {
  if ! [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] || [ "$2" -lt "$3" ]; then
    fail "$1 is '$2', and must be a whole number from $3 to 999999999, without a sign or zeros before it: $4"
  fi
}

# Sets RANKS_PER_NODE where it is not: one for each GPU of a node that was asked for, in --gpus-per-node=8, h200:8
# or h200:4,a100:4. Not for each that the job has, as those are all of the node with --exclusive.
count_ranks() {
  local parts part sum=0
  if [ -z "${RANKS_PER_NODE:-}" ]; then
    IFS=, read -ra parts <<< "${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}"
    if [ ${#parts[@]} -eq 0 ]; then fail "Slurm gives no GPUs: set RANKS_PER_NODE"; fi
    for part in "${parts[@]}"; do
      whole "the number in --gpus-per-node, $part," "${part##*:}" 0 "ask for [TYPE:]NUMBER, or set RANKS_PER_NODE"
      sum=$((sum + ${part##*:}))
    done
    RANKS_PER_NODE=$sum
  fi
  whole RANKS_PER_NODE "$RANKS_PER_NODE" 1 "unset it for one for each GPU that --gpus-per-node asks for"
  export RANKS_PER_NODE
}

# On all nodes at once: node.sh with arguments.
# Args: what it is called in its logs and at its meeting point; the arguments.
#
# --ntasks: else srun would take it from sbatch, and --ntasks-per-node=8 there would mean 8 node.sh a node.
# --cpus-per-task: srun does not take it from the job, and would bind all ranks of a node to one core.
# --kill-on-bad-exit: ranks of other nodes would wait in a collective for those of a node that failed.
# --export: what is exported here must come through even if the job was submitted with --export=NONE.
on_nodes() {
  local name=$1 more container
  shift
  read -ra more <<< "${SRUN_ARGS:-}"
  read -ra container <<< "${CONTAINER:-}"
  export RDZV_ID=$SLURM_JOB_ID-$name
  local step=(--nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1
    --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none --kill-on-bad-exit=1 --export=ALL
    --output="$logs/$name-%N.log")
  srun "${step[@]}" "${more[@]}" "${container[@]}" bash scripts/slurm/node.sh "$@"
}

# Who failed first, and the end of its log: what torchrun says of the first failure on each node, by time, which
# it tells in seconds. Within one, a rank that was killed goes before those that lost their connection to it.
# Args: the name of what failed.
tell_first_failure() {
  local failures first time code what
  failures=$(awk '
    FNR == 1 { cause = 0 }
    /^Root Cause/ { cause = 1 }
    cause && $1 == "time" { time = $3 }
    cause && $1 == "rank" { rank = $3 }
    cause && $1 == "exitcode" { print time, $3, "rank " rank ", log " FILENAME; cause = 0 }
  ' "$logs/$1-"*.log | sort -k1,1 -k2,2n) || true
  if [ -z "$failures" ]; then
    say "no rank is named as the first to fail; the logs in $logs end with" >&2
    tail -n 5 "$logs/$1-"*.log | head -n 60 >&2 || true
    return
  fi
  while read -r time code what; do say "$time: exit code $code, $what" >&2; done <<< "$failures"
  first=${failures%%$'\n'*}
  say "the first to fail is ${first#* * }, which ends with" >&2
  tail -n 60 "${first##* log }" >&2 || true
}

# What a preflight found: rank 0's table, in the log of its node. Fails where the table is not whole.
# Args: the name of the preflight.
show_preflight() {
  local log
  log=$(grep -l '^Preflight of ' "$logs/$1-"*.log) || return 1
  log=${log%%$'\n'*}
  sed -n '/^Preflight of /,/^preflight: /p' "$log"
  grep -q '^preflight: .*checks' "$log"
}

# Ends the job: back into the queue, unless it was ended from outside or was there too often.
# Args: what was done until now.
queue_again() {
  if [ -n "$ended" ]; then
    say "$1; the job itself was ended (scancel, or its time limit), so it is not queued again from here"
    exit 0
  fi
  if [ "$restart" -ge "$most" ]; then
    say "$1; it was queued again $restart times, and MAX_RESTARTS=$most allows no more" >&2
    exit 1
  fi
  say "$1: queueing the job again"
  scontrol requeue "$SLURM_JOB_ID"
}

main() {
  if [ ! -f pretrain_bdlm.py ]; then fail "$PWD has no pretrain_bdlm.py: it is not the project's root"; fi
  if [ $# -eq 0 ]; then fail "no arguments: give a config file, and flags"; fi

  local code=0 nodes stop_mark timeout word
  for word in "$@"; do
    case $word in
      --dry-run | --print-config | --preflight | --help | -h)
        fail "$word ends before the first step, and a job is there to train: leave it out, or do it without sbatch" ;;
      --preflight-timeout | --preflight-timeout=*)
        fail "$word is of the preflight, and these arguments are the run's too: set PREFLIGHT_TIMEOUT=SECONDS" ;;
    esac
  done
  # shellcheck disable=SC2086  # split at spaces, as on_nodes splits it
  for word in ${SRUN_ARGS:-}; do
    case $word in
      --output | --output=* | -o* | --error | --error=* | -e*)
        fail "SRUN_ARGS has $word, and this script reads the nodes' logs: leave it out, and choose a folder with LOGS" ;;
    esac
  done
  restart=${SLURM_RESTART_COUNT:-0} most=${MAX_RESTARTS:-100} ended=''
  whole MAX_RESTARTS "$most" 0 "unset it for 100"
  timeout=${PREFLIGHT_TIMEOUT:-60}
  whole PREFLIGHT_TIMEOUT "$timeout" 1 "unset it for 60"
  whole SLURM_CPUS_ON_NODE "${SLURM_CPUS_ON_NODE:-}" 1 "Slurm sets it for a batch job: start this with sbatch"
  count_ranks
  logs=${LOGS:-runs/slurm}/$SLURM_JOB_ID
  mkdir -p "$logs"
  # Slurm sends the batch shell SIGTERM, and SIGKILL later, when it ends the whole job; what is preempted, or near
  # its limit, is told on the nodes alone. The shell must live until the run has saved, and then leave it at that:
  # a job that is being cancelled could be queued again.
  trap 'ended=1' TERM

  # Every node meets the others at the first host of the allocation, at a port that is the job's own.
  nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
  export RDZV_HOST=${nodes%%$'\n'*} RDZV_PORT=$((20000 + SLURM_JOB_ID % 10000))
  stop_mark=$logs/start$restart.stopped # node.sh makes it when it is told to stop
  export STOP_MARK=$stop_mark
  # Where every rank writes what it was in when a collective did not end: settings.sh switches it on.
  export TORCH_FR_DUMP_TEMP_FILE=${TORCH_FR_DUMP_TEMP_FILE:-$logs/start$restart.trace-rank}
  rm -f "$stop_mark"

  say "start $restart on ${nodes//$'\n'/ }, $RANKS_PER_NODE ranks a node; logs: $logs/{preflight,start}$restart-NODE.log"
  on_nodes "preflight$restart" "$@" --preflight --preflight-timeout "$timeout" || code=$?
  if [ "$code" -ne 0 ]; then
    say "the preflight FAILED with code $code, and nothing was trained:" >&2
    show_preflight "preflight$restart" >&2 || tell_first_failure "preflight$restart"
    exit "$code"
  fi
  if ! grep -hE '^([0-9]+: *)?preflight: all [1-9][0-9]* checks passed' "$logs/preflight$restart-"*.log; then
    say "the preflight ended with code 0, but no log of it says that all checks passed; nothing was trained" >&2
    tell_first_failure "preflight$restart"
    exit 1
  fi
  if [ -e "$stop_mark" ] || [ -n "$ended" ]; then
    queue_again "told to stop before the first step"
    exit 0
  fi

  on_nodes "start$restart" "$@" --exit-signal SIGUSR1 || code=$?
  if [ "$code" -ne 0 ]; then
    say "FAILED with code $code on start $restart" >&2
    tell_first_failure "start$restart"
    exit "$code"
  fi
  if [ -e "$stop_mark" ]; then queue_again "stopped and saved"; else say "done"; fi
}

# As one command, which bash reads as a whole before the hours in which another version may be checked out.
main "$@"; exit
