"""tools.modes: by hand, and as docs/parallelism.md shows it."""

import re
from pathlib import Path

import pytest

from megatron_bp.tools.modes import Cost, costs, main, packed_row

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
    assert by_mode["BP"] == Cost("BP", 576 / 400, 36, 0)
    assert (by_mode["CSBP"].rows, by_mode["CSBP"].sent) == (24, 12)
    assert (by_mode["CP"].rows, by_mode["CP"].sent) == (22, 22)


@pytest.mark.parametrize(("documents", "place"), [("1", 0), ("64", 1)])
def test_the_table_of_the_page(
    documents: str, place: int, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7 and re.fullmatch(r"[\d.]+", cells[1]):
            shown[cells[0]] = cells[1 + 3 * place : 4 + 3 * place]
    main(["--documents", documents])
    lines = capsys.readouterr().out.splitlines()[2:]
    printed = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {row[0]: row[1:] for row in printed} == shown


@pytest.mark.parametrize(
    "flags", ["--ranks 1", "--documents 0", "--block-size 0", "--length 3 --documents 4"]
)
def test_nonsense_is_refused(flags: str) -> None:
    with pytest.raises(SystemExit, match="modes: error: --"):
        main(flags.split())
