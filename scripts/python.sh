#!/usr/bin/env bash
# Prints the path of a Python this project can use, or says what is missing and exits with 1.
# Set PYTHON to prefer one of your own.
set -u

# The range is requires-python of pyproject.toml.
probe='
import sys
version = ".".join(map(str, sys.version_info[:3]))
if not (3, 12) <= sys.version_info[:2] < (3, 14):
    sys.exit(f"is Python {version}")
try:
    import ensurepip, venv
except ImportError as error:
    sys.exit(f"is Python {version} without the module {error.name}")
print(getattr(sys, "_base_executable", None) or sys.executable)  # not the one of a venv
'

reasons=""
# Args: a command or a path. Prints the real path and ends the script where it suits.
try() {
  local answer
  if answer=$("$1" -I -c "$probe" 2>&1); then
    # The last line: a wrapper may print something of its own first.
    printf '%s\n' "${answer##*$'\n'}"
    exit 0
  fi
  reasons+="  $1: ${answer##*$'\n'}"$'\n'
}

if [ -n "${PYTHON:-}" ]; then
  try "$PYTHON"
  echo "python.sh: PYTHON does not suit, looking for another:" >&2
  printf '%s' "$reasons" >&2
fi
for name in python3.12 python3.13 python3; do
  if command -v "$name" > /dev/null; then try "$name"; fi
done
# A pyenv shim answers only for the versions that are switched on: look at all that are installed.
for path in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23]*/bin/python3; do
  if [ -x "$path" ]; then try "$path"; fi
done
if command -v uv > /dev/null; then
  path=$(uv python find --no-python-downloads '>=3.12,<3.14' 2> /dev/null) && try "$path"
fi

cat >&2 << EOF
python.sh: no Python >=3.12,<3.14 with the modules venv and ensurepip. Seen:
${reasons:-  none
}Ways to get one:
  Debian, Ubuntu   apt-get install python3.12 python3.12-venv
  uv               uv python install 3.12
  pyenv            pyenv install 3.12
  conda            conda create -n py312 python=3.12, then PYTHON=<its path>/bin/python
  a cluster        often \`module load python/3.12\`
or set PYTHON to the path of one that is installed elsewhere.
EOF
exit 1
