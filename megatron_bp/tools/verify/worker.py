"""One rank of one layout: pretrain_bdlm.py on the layout's config, watched.

    python -m megatron_bp.tools.verify.worker FOLDER

The usual variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) say which.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_bp import cpu
from megatron_bp.tools.verify.order import CONFIG, METRICS, Order


def main(argv: Sequence[str] | None = None) -> None:
    """Train the layout in the folder that is named."""
    (name,) = sys.argv[1:] if argv is None else argv
    folder = Path(name)
    if cpu.needed():
        cpu.install()
    import pretrain_bdlm
    from megatron_bp.tools.verify import observe

    observe.install(folder, Order.read(folder))
    pretrain_bdlm.main([str(folder / CONFIG), "--metrics-file", str(folder / METRICS)])


if __name__ == "__main__":
    main()
