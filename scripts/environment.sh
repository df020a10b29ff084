#!/usr/bin/env bash
# Makes .venv in the project's root, or brings it up to date. Quick when there is nothing to do, and safe
# to call twice at a time. pip's own settings (PIP_* and pip.conf) apply. A Python that suits is found by
# scripts/python.sh. For a GPU, add what you need by hand: .venv/bin/pip install -e ".[te,flash]"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "environment: $*"; }
extras=test,dev
stamp=.venv/megatron_bp.stamp
log=.venv/install.log

# Prints what .venv has to be made from; fails where its Python does not run or does not suit. The folder
# is part of it because a venv cannot be moved.
wanted() {
  .venv/bin/python -I - "$PWD" "$extras" 2> /dev/null << 'EOF'
import hashlib, sys
folder, extras = sys.argv[1:]
if not (3, 12) <= sys.version_info[:2] < (3, 14):
    sys.exit(1)
with open(f"{folder}/pyproject.toml", "rb") as file:
    project = hashlib.sha256(file.read()).hexdigest()
print(folder, sys.version.split()[0], extras, project)
EOF
}
current() { [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(wanted)" ]; }

if current; then
  say "up to date"
  exit 0
fi

begin=$SECONDS
python=$(scripts/python.sh)
exec 9> .venv.lock
# Held as long as this shell and its pip live, then gone by itself. Needs no flock command.
"$python" -I -c '
import fcntl
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("environment: waiting for another environment.sh", flush=True)
    fcntl.flock(9, fcntl.LOCK_EX)
except OSError as error:
    print(f"environment: no file locks here ({error}); do not run this twice at a time")
'
if current; then
  say "up to date, made by another environment.sh"
  exit 0
fi

pip=""
stop() {
  [ -z "$pip" ] || kill "$pip" 2> /dev/null || true
  say "interrupted; run it again to go on"
  exit 130
}
trap stop INT TERM

moved() { [ -f "$stamp" ] && [[ "$(cat "$stamp")" != "$PWD "* ]]; }
if ! wanted > /dev/null || ! .venv/bin/python -I -m pip --version > /dev/null 2>&1 || moved; then
  say "making .venv with $("$python" -V)"
  "$python" -I -m venv --clear .venv
fi
rm -f "$stamp"

say "installing .[$extras]; a first time takes minutes (log: $log)"
.venv/bin/python -m pip install --progress-bar off -e ".[$extras]" > "$log" 2>&1 &
pip=$!
while kill -0 "$pip" 2> /dev/null; do
  for _ in $(seq 20); do
    sleep 0.5
    kill -0 "$pip" 2> /dev/null || break 2
  done
  doing="fetching"
  grep -q '^Installing collected packages' "$log" && doing="unpacking"
  say "$((SECONDS - begin)) s, $doing, $(grep -c '^Collecting ' "$log" || true) packages so far"
done
if ! wait "$pip"; then
  tail -n 20 "$log" >&2
  say "FAILED: pip could not install .[$extras]; all of its output is in $log" >&2
  exit 1
fi
wanted > "$stamp"
say "ready after $((SECONDS - begin)) s: .venv with $(.venv/bin/python -V)"
