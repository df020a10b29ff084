"""Parts of a view: few runs of rows are views of memory, many are gathered; no pair is lost."""

import numpy as np
import pytest
import torch

from megatron_bp.attention.kernels.tiled import Tiled
from megatron_bp.attention.parts import MOST_VIEWS, Held, make_view
from megatron_bp.data.document import Document
from megatron_bp.sequence.packing import pack
from megatron_bp.sequence.plan import SequenceOptions, make_plan
from megatron_bp.sequence.visibility import visibility


@pytest.mark.parametrize("documents", [1, MOST_VIEWS - 1, MOST_VIEWS, 9])
def test_few_runs_of_rows_are_parts_of_their_own(documents: int) -> None:
    one = Document(np.zeros(12, np.int32), np.ones(12, np.bool_), 0)
    plan = make_plan(pack([one] * documents, 12 * documents), SequenceOptions(4, score_clean="all"))
    rows = plan.rows_of(0)
    seen = visibility(plan, rows.clean, rows.corrupted)
    view = make_view(seen, Held.of_rank(rows), (), Tiled(), torch.device("cpu"))
    assert view.pairs == seen.pairs()
    # All clean rows, and in each document the corrupted ones but those of its first block.
    length = 12 * documents
    runs = [(0, length)] + [(length + 12 * d + 4, length + 12 * d + 12) for d in range(documents)]
    if len(runs) <= MOST_VIEWS:
        assert [part.rows for part in view.clean] == [slice(*run) for run in runs]
    else:
        (part,) = view.clean
        assert isinstance(part.rows, torch.Tensor)
        assert part.rows.tolist() == [row for run in runs for row in range(*run)]
