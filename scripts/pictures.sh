#!/usr/bin/env bash
# The pictures of README and docs, into docs/pictures, from the code that training uses. Nothing is measured; takes
# about half a minute. Needs matplotlib: .venv/bin/pip install -e ".[plot]"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export OMP_NUM_THREADS=1
draw() { .venv/bin/python -m megatron_bp.tools.draw "$@"; }
out=docs/pictures

draw mask --documents 22,8+6,18 --block-size 4 --row-cost 0 --bp 4 --out "$out/mask"
draw mask --documents 22,8+6,18 --block-size 4 --row-cost 0 --bp 1 --cp 4 --out "$out/mask_cp"
draw owners --length 262144 --random 30 --block-size 256 --bp 8 --out "$out/owners"
draw cost --length 131072 --random 12 --seed 1 --ranks 8 --out "$out/cost"
draw bytes --length 131072 --random 30 --block-size 256 --ranks 8 --out "$out/bytes"
predicted=$(mktemp)
trap 'rm -f "$predicted"' EXIT
.venv/bin/python -m megatron_bp.tools.paper --series "$predicted"
draw scaling --predicted "$predicted" --out "$out/scaling_paper"
