"""Pictures of a layout: its rows and ranks, as tools/draw paints them."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_bp.data.document import Document
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.task import Task
from megatron_bp.sequence.packing import pack

BLOCKS = (5, 3, 4)  # of three documents, few enough to see every row
TOKENS = 4  # a block


def draw(task: Task, layout: Layout, folder: Path) -> list[Path]:
    """Files of who sees whom and who owns what, in a row of three short documents.

    Blocks are of 4 tokens, and windows shrink as blocks do: real ones have too many rows to see.
    """
    from megatron_bp.tools.draw.sample import draw_sample

    keys = range(len(BLOCKS))
    sizes = [TOKENS * n - (key == 0) for key, n in zip(keys, BLOCKS, strict=True)]
    documents = [
        Document(np.zeros(n, np.int32), np.ones(n, np.bool_), key)
        for key, n in zip(keys, sizes, strict=True)
    ]
    sequence = replace(task.sequence, block_size=TOKENS)
    return draw_sample(
        replace(task, sequence=sequence), layout, pack(documents, sum(sizes)), folder
    )
