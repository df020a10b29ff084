"""tools.modes: by hand, and as docs/parallelism.md shows it."""

import re
from pathlib import Path

import numpy as np
import pytest

from megatron_bp.tools.modes import Cost, costs, main, over_draws, packed_row, random_row

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"


def test_two_ranks_by_hand() -> None:
    """24 tokens in 6 blocks of 4, rows that cost nothing by themselves: work is visible pairs.

    Clean rows 0..19 (the last block is not needed): 4 x (4 + 8 + 12 + 16 + 20) = 240 pairs.
    Corrupted rows: 4 x (0 + 4 + ... + 20) clean and 6 x 16 own ones = 240 + 96 = 336. In all 576.
    BP: units 0..4 cost 5 x 16 + 4 x (4 + 8 + 12 + 16) = 240 and need blocks 0..3, 160: 400. The
    other rank has unit 5 with 96, and needs blocks 0..4, 240: 336. Any other split is dearer.
    """
    by_mode = {cost.mode: cost for cost in costs(packed_row(24, 1), 2, 4, 0)}
    assert list(by_mode) == ["CSBP", "CP", "BP"]
    assert by_mode["BP"] == Cost("BP", 576 / 400, 36, 0, 0)
    assert (by_mode["CSBP"].rows, by_mode["CSBP"].sent) == (24, 12)
    # Rank 0 has blocks 0 and 4 and sees all 20, rank 1 has 1 to 3 and sees 16.
    assert by_mode["CSBP"].lacked == ((20 - 8) + (16 - 12)) / 2
    assert (by_mode["CP"].rows, by_mode["CP"].sent, by_mode["CP"].lacked) == (22, 22, None)


def test_of_several_rows_the_worst_and_the_mean() -> None:
    rows = [costs(random_row(2048, 3, draw), 4, 16, 100)[0] for draw in (0, 1)]
    got = over_draws(rows)
    assert got.speed_up == min(row.speed_up for row in rows)
    assert got.rows == max(row.rows for row in rows)
    assert got.lacked == sum(row.lacked or 0 for row in rows) / 2
    assert rows[0].lacked != rows[1].lacked


def test_random_documents_fill_the_row() -> None:
    for documents in (1, 7, 40):
        row = random_row(4096, documents, 1)
        assert np.bincount(row.document).sum() == 4096
        assert np.bincount(row.document).min() >= 64
        assert row.document[-1] == documents - 1


def test_units_can_be_kept_at_home(capsys: pytest.CaptureFixture[str]) -> None:
    """Two draws of seven documents on 4 ranks: moved units level ranks for rows that are lacked."""
    seen = []
    for most in ("1.03", "100"):
        main(f"--length 8192 --documents 7 --draws 2 --ranks 4 --max-imbalance {most}".split())
        line = capsys.readouterr().out.splitlines()[2]
        cells = [cell.strip().replace(",", "") for cell in line.strip("|").split("|")]
        seen.append((float(cells[1]), int(cells[4])))
    (speed_up, lacked), (at_home, lacked_at_home) = seen
    assert speed_up >= 4 / 1.03 - 0.005 > at_home
    assert lacked > lacked_at_home


@pytest.mark.parametrize(("documents", "place"), [("1", 0), ("64", 1)])
def test_the_table_of_the_page(
    documents: str, place: int, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 9 and re.fullmatch(r"[\d.]+", cells[1]):
            shown[cells[0]] = cells[1 + 4 * place : 5 + 4 * place]
    main(["--documents", documents])
    lines = capsys.readouterr().out.splitlines()[2:]
    printed = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {row[0]: row[1:] for row in printed} == shown


@pytest.mark.parametrize(
    "flags",
    [
        "--ranks 1",
        "--max-imbalance 0.5",
        "--draws -1",
        "--documents 0",
        "--block-size 0",
        "--length 3 --documents 4",
    ],
)
def test_nonsense_is_refused(flags: str) -> None:
    with pytest.raises(SystemExit, match="modes: error: --"):
        main(flags.split())


def test_many_short_documents_fill_a_row_and_none_is_below_the_least() -> None:
    for documents in (100, 1000):  # at least 10 tokens, and 1
        row = random_row(1000, documents, 0)
        sizes = np.bincount(row.document)
        assert (len(sizes), sizes.sum()) == (documents, 1000)
        assert sizes.min() == 1000 // documents
