"""Prints how far logits are apart after an import, for a tiny random model of every family.

python tests/agreement.py    # the table of docs/converting.md
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from safetensors.torch import load_file
from tiny import FAMILIES, save_tiny

from megatron_bp import cpu


def line(family: str, base: Path) -> str:
    """One row of the table."""
    from megatron_bp.tools.convert.checking import check_folder
    from megatron_bp.tools.convert.exporting import export_folder
    from megatron_bp.tools.convert.importing import KEPT, import_folder

    source, checkpoint, back = base / "folder", base / "checkpoint", base / "back"
    save_tiny(family, source)
    import_folder(source, checkpoint, quiet=True)
    rows = check_folder(source, checkpoint).rows
    export_folder(checkpoint / KEPT, checkpoint, back, quiet=True)
    before, after = (load_file(f / "model.safetensors") for f in (source, back))
    bitwise = before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in after)
    near = next(row for row in rows if row.start == 0)
    far = [row for row in rows if row.start]
    cells = [near.same, max(row.same for row in far), near.as_it_is]
    cells.append(max(row.as_it_is for row in far if row.near))
    told = " | ".join(f"{cell:.1e}" for cell in cells)
    return f"| {family} | {told} | {'yes' if bitwise else 'NO'} |"


def main() -> None:
    if cpu.needed():
        cpu.install()
    found = []
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as base:
            found.append(line(family, Path(base)))
    print("\n".join(found))


if __name__ == "__main__":
    main()
