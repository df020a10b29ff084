"""Benchmarks: what they count, by hand, and that they run at a small size."""

import json
from pathlib import Path

import pytest

from megatron_bp.sequence.plan import SequenceOptions, make_plan
from megatron_bp.tools.bench import sft
from megatron_bp.tools.bench.__main__ import main


def test_counts_by_hand() -> None:
    """A prompt of 6, an answer of 4, blocks of 4 that begin anew with the answer.

    Answer supervised: blocks [0, 4) [4, 6) [6, 10); corrupted rows of the last alone: 4, each sees
    6 clean and its own 4: 40 pairs. Clean rows before it: 4 x 4 + 2 x 6 = 28. In all 68.
    All supervised: blocks [0, 4) [4, 8) [8, 10); corrupted 4 x 4 + 4 x (4 + 4) + 2 x (8 + 2) = 68.
    Clean rows before the last block: 4 x 4 + 4 x 8 = 48. In all 116.
    """
    found = {
        way: sft.counts(make_plan(sft.chat(6, 4, every), SequenceOptions(4, grid="response")))
        for way, every in sft.WAYS.items()
    }
    assert found["answer supervised"] == sft.Counts(6, 4, 68)
    assert found["all supervised"] == sft.Counts(8, 10, 116)


def test_the_size_of_the_documented_run_by_formula() -> None:
    """30,000 + 512, blocks of 32. A prompt of P = 937 x 32 + 16: its last block is short.

    Clean pairs of m whole blocks of b: b^2 m (m + 1) / 2. Answer: m = 937, then 16 rows that see P,
    then 15 blocks of the answer, the j-th seeing P + 32 j, j = 1..15; corrupted rows of block j =
    0..15 see P + 32 j and their own 32.
    """
    p, b = 30_000, 32
    clean = b * b * 937 * 938 // 2 + 16 * p + sum(b * (p + b * j) for j in range(1, 16))
    corrupted = sum(b * (p + b * j + b) for j in range(16))
    plan = make_plan(sft.chat(p, 512, False), SequenceOptions(b, grid="response"))
    assert sft.counts(plan) == sft.Counts(p + 480, 512, clean + corrupted)


@pytest.mark.ranks
def test_a_small_run(tmp_path: Path) -> None:
    """In a process of its own: it makes Megatron's parallel state."""
    import ranks

    told, result = ranks.run_ranks(1, small, str(tmp_path / "told.json"), fresh=True)[0]
    ways = result["ways"]
    assert ways["answer supervised"]["corrupted_rows"] == 8
    assert ways["all supervised"]["corrupted_rows"] == 49
    assert all(len(way["seconds"]) == 2 and min(way["seconds"]) > 0 for way in ways.values())
    assert "| corrupted rows | 8 | 49 | 6.12 |" in told


def small(rank: int, world: int, file: str) -> tuple[str, dict]:
    import contextlib
    import io

    import torch

    torch.distributed.destroy_process_group()  # the benchmark makes its own
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        main(f"sft --prompt 41 --answer 8 --block 4 --heads 1 --repeats 2 --json {file}".split())
    return told.getvalue(), json.loads(Path(file).read_text())


@pytest.mark.parametrize("wrong", ["--answer 0", "--block 0", "--repeats -1", "--prompt -1"])
def test_sizes_that_no_row_can_have(wrong: str) -> None:
    with pytest.raises(SystemExit, match=f"error: {wrong}: "):
        main(["sft", *wrong.split()])


def test_a_table_goes_to_its_place_on_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And is replaced by the next; the flags that say where results go are left out."""
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- small -->\nold\n<!-- end of small -->\nafter\n")
    command = "sft --prompt 6 --answer 4 --block 4 --repeats 0"
    for _ in range(2):
        main(
            [*command.split(), "--page", str(page), "small", "--json", str(tmp_path / "told.json")]
        )
    text = page.read_text()
    assert text.startswith(
        "before\n<!-- small -->\n    .venv/bin/python -m megatron_bp.tools.bench"
    )
    assert f"bench {command}\n" in text
    assert "old" not in text
    assert text.count("| visible pairs | 68 | 116 | 1.71 |\n<!-- end of small -->\nafter\n") == 1
    with pytest.raises(SystemExit, match="large: it has no lines <!-- large -->"):
        main([*command.split(), "--page", str(page), "large"])
    with pytest.raises(SystemExit, match="No such file or directory; give a page that is there"):
        main([*command.split(), "--page", str(tmp_path / "none.md"), "small"])
