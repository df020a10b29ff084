#!/usr/bin/env bash
# The body of both batch scripts: starts node.sh on every node, queues the job again if the run was told to
# stop, and says who failed if it did. Arguments are those of pretrain_bdlm.py. Variables, all optional:
#   SETUP           a file that every node sources first: modules, an environment
#   CONTAINER       words before the command on a node, such as "apptainer exec --nv IMAGE.sif"
#   SRUN_ARGS       more words for srun, such as "--container-image=IMAGE --container-mounts=/data"
#   PYTHON          default .venv/bin/python
#   RANKS_PER_NODE  default: the GPUs of a node
#   LOGS            default runs/slurm; every job has a folder in it, and every node a file for each start
#   MAX_RESTARTS    default 100; how often a job is queued again
set -euo pipefail

say() { echo "job.sh: $*"; }
fail() {
  say "error: $*" >&2
  exit 2
}
if [ ! -f pretrain_bdlm.py ]; then fail "$PWD has no pretrain_bdlm.py: call sbatch in the project's root"; fi
if [ $# -eq 0 ]; then fail "no arguments: give a config file, and flags"; fi

restart=${SLURM_RESTART_COUNT:-0} most=${MAX_RESTARTS:-100}
logs=${LOGS:-runs/slurm}/$SLURM_JOB_ID
mkdir -p "$logs"

# Every node meets the others at the first host of the allocation, at a port that is the job's own.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export RDZV_HOST=${nodes%%$'\n'*} RDZV_PORT=$((20000 + SLURM_JOB_ID % 10000))
export RDZV_ID=$SLURM_JOB_ID-$restart
export STOP_MARK=$logs/start$restart.stopped # node.sh makes it when it passes a signal on
export RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:?gives no GPUs: set RANKS_PER_NODE}}
rm -f "$STOP_MARK"

# --cpus-per-task: srun does not take it from the job, and would bind all ranks of a node to one core.
# --kill-on-bad-exit: ranks of other nodes would wait in a collective for those of a node that failed.
# --export: what is exported here must come through even if the job was submitted with --export=NONE.
step=(--nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}"
  --cpu-bind=none --kill-on-bad-exit=1 --export=ALL --output="$logs/start$restart-%N.log")
read -ra more <<< "${SRUN_ARGS:-}"
read -ra container <<< "${CONTAINER:-}"

say "start $restart on ${nodes//$'\n'/ }, $RANKS_PER_NODE ranks a node; logs: $logs/start$restart-NODE.log"
# SIGTERM, as Slurm sends it before it ends a job, must not end this shell before the run has saved.
trap : TERM
code=0
srun "${step[@]}" "${more[@]}" "${container[@]}" bash scripts/slurm/node.sh \
  "$@" --exit-signal SIGUSR1 || code=$?

if [ "$code" -ne 0 ]; then
  say "FAILED with code $code on start $restart" >&2
  # What torchrun says of the first failure on each node, by time, which it tells in seconds. Within one, a rank
  # that was killed goes before those that lost their connection to it.
  failures=$(awk '
    FNR == 1 { cause = 0 }
    /^Root Cause/ { cause = 1 }
    cause && $1 == "time" { time = $3 }
    cause && $1 == "rank" { rank = $3 }
    cause && $1 == "exitcode" { print time, $3, "rank " rank ", log " FILENAME; cause = 0 }
  ' "$logs/start$restart-"*.log | sort -k1,1 -k2,2n) || true
  if [ -z "$failures" ]; then
    say "no rank is named as the first to fail: see $logs" >&2
    exit "$code"
  fi
  while read -r time exit_code what; do say "$time: exit code $exit_code, $what" >&2; done <<< "$failures"
  first=${failures%%$'\n'*}
  say "the first to fail is ${first#* * }, which ends with" >&2
  tail -n 60 "${first##* log }" >&2 || true
  exit "$code"
fi
if [ ! -e "$STOP_MARK" ]; then
  say "done"
  exit 0
fi
if [ "$restart" -ge "$most" ]; then
  say "stopped and saved; it was queued again $restart times, and MAX_RESTARTS=$most allows no more" >&2
  exit 1
fi
say "stopped and saved: queueing the job again"
scontrol requeue "$SLURM_JOB_ID"
