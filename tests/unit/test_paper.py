"""The paper's tables: bytes worked out by hand, the fit, what it predicts, and the page."""

import dataclasses
from pathlib import Path

import pytest

from megatron_bp.planning.rates import read
from megatron_bp.tools.paper.__main__ import main
from megatron_bp.tools.paper.counting import Counted, counted
from megatron_bp.tools.paper.figures import CELLS, TIMES, Cell
from megatron_bp.tools.paper.fit import fit
from megatron_bp.tools.paper.page import HELD_OUT, fitted, page
from megatron_bp.tools.paper.predict import ours, paper

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "paper.md"
RATES = read()[0]


def cell_of(model: str, length: int = 262_144) -> Cell:
    (found,) = (c for c in CELLS if (c.model, c.length) == (model, length))
    return found


# --- traffic, by hand ----------------------------------------------------------------------------

GIB = 2**30
LENGTH, RANKS, BYTES, PASSES = 262_144, 8, 2, 3  # two fetches and the gradients

# Nemotron 14B: 40 layers, 8 key heads of 128. Each rank sends its eighth of the rows to 7 others:
# 262,144 x 40 x 2 x 8 x 128 x 2 B x 7/8 = 35 GiB a pass over clean rows.
NEMOTRON_PASS = LENGTH * 40 * 2 * 8 * 128 * BYTES * 7 / 8 / GIB
# DiffusionGemma: 25 layers with a window, 8 key heads of 256; 5 without, 2 of 512.
FULL_PASS = LENGTH * 5 * 2 * 2 * 512 * BYTES * 7 / 8 / GIB  # 4.375
WINDOW_PASS = LENGTH * 25 * 2 * 8 * 256 * BYTES * 7 / 8 / GIB  # 43.75
# 16 chunks in zigzag: of their 15 edges the middle one lies inside of rank 7. At each of the other
# 14 the 1,023 rows before it are needed by the rank that comes after; the mean over 8 ranks.
HALO_PASS = 14 * 1_023 * 25 * 2 * 8 * 256 * BYTES / RANKS / GIB  # 0.3415


def test_constants() -> None:
    assert (NEMOTRON_PASS, FULL_PASS, WINDOW_PASS) == (35, 4.375, 43.75)
    assert abs(HALO_PASS - 0.3415) < 0.00005


def sent(counts: Counted) -> float:
    return counts.sent / GIB


def test_traffic_of_nemotron_is_the_papers() -> None:
    """CP sends corrupted rows too."""
    cell = cell_of("Nemotron 14B")
    cp, csbp = sent(counted(cell, "CP")), sent(counted(cell, "CSBP"))
    assert cp == pytest.approx(2 * PASSES * NEMOTRON_PASS, abs=1e-6)
    assert csbp == pytest.approx(PASSES * NEMOTRON_PASS, abs=1e-6)
    assert abs(cp - 210.00) <= 0.006
    assert abs(csbp - 105.00) <= 0.006


def test_traffic_of_diffusion_gemma_is_the_papers() -> None:
    """Two passes: CP sends clean rows in the first, in the second clean and corrupted ones."""
    cell = cell_of("DiffusionGemma 26B-A4B")
    cp, csbp = sent(counted(cell, "CP")), sent(counted(cell, "CSBP"))
    assert cp == pytest.approx(3 * PASSES * (FULL_PASS + WINDOW_PASS), abs=1e-6)
    assert csbp == pytest.approx(2 * PASSES * (FULL_PASS + HALO_PASS), abs=1e-6)
    assert abs(cp - 433.13) <= 0.006
    assert abs(csbp - 28.30) <= 0.006


def test_one_pass_halves_it() -> None:
    cell = cell_of("DiffusionGemma 26B-A4B")
    one = sent(counted(cell, "CSBP", one_pass=True))
    assert one == pytest.approx(PASSES * (FULL_PASS + HALO_PASS), abs=1e-6)
    assert one == sent(counted(cell, "CSBP")) / 2
    assert counted(cell_of("Nemotron 14B"), "CSBP", one_pass=True).sent / GIB == pytest.approx(105)


def test_a_plan_that_leaves_out_clean_rows_or_moves_units_sends_other_bytes() -> None:
    """Why the options above are named: the last block's 256 clean rows are needed by nobody."""
    counts = counted(cell_of("Nemotron 14B"), "CSBP")
    assert counts.task.sequence.score_clean == "all"
    assert sum(rank.clean for rank in counts.counts.ranks) == LENGTH


# --- rates ---------------------------------------------------------------------------------------


def test_the_file_holds_what_the_fit_gives() -> None:
    """Three numbers, to the digits that are written there."""
    found = fit()
    assert dataclasses.astuple(RATES) == tuple(round(x, 3) for x in dataclasses.astuple(found))
    assert found.products == found.attention


def test_the_fit_is_the_least_of_its_neighbours() -> None:
    """Errors squared grow with each number by 1 % up or down; products and attention together."""

    def off(**factors: float) -> float:
        found = fit()
        rates = dataclasses.replace(
            found, **{name: getattr(found, name) * by for name, by in factors.items()}
        )
        # relative errors of seconds by inverse rates, as the fit takes them
        return sum((got / told - 1) ** 2 for _, got, told in fitted(rates))

    least = off()
    for by in (0.99, 1.01):
        assert off(products=by, attention=by) > least
        assert off(combined_attention=by) > least
        assert off(link=by) > least
    assert len(list(fitted(RATES))) == 8


@pytest.mark.parametrize(("model", "length"), HELD_OUT)
@pytest.mark.parametrize("scheme", ["CP", "CSBP"])
def test_held_out_cells_are_predicted_within_a_tenth(model: str, length: int, scheme: str) -> None:
    cell = cell_of(model, length)
    told = cell.tokens[scheme]
    assert abs(paper(cell, scheme, RATES).rate / told - 1) <= 0.10


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(RATES)])
@pytest.mark.parametrize("by", [0.8, 1.2])
def test_each_rate_moves_the_table(name: str, by: float) -> None:
    """The cell that moves most does so by 1 % or more (link: CP at 64K has most traffic)."""
    changed = dataclasses.replace(RATES, **{name: getattr(RATES, name) * by})
    moved = [
        abs(paper(cell, scheme, changed).rate / paper(cell, scheme, RATES).rate - 1)
        for cell in (cell_of("Nemotron 14B", 65_536), cell_of("Nemotron 14B"))
        for scheme in cell.tokens
    ]
    assert max(moved) >= 0.01


# --- this project's exchange ---------------------------------------------------------------------


def test_our_exchange_waits_for_what_own_keys_do_not_hide() -> None:
    """Nemotron 14B at 64K, by hand: 256 blocks in 16 chunks of about 16, two on each of 8 ranks.

    A layer's pass brings 7 x 8,192 rows of 4,096 B at 63.6 GB/s, 3.693 ms; three in 40 layers are
    0.443 s, were nothing hidden. Pairs with own keys, in blocks squared: clean rows see 136 in each
    chunk, and the late chunk sees the early one, 256; corrupted rows see 120 in each, 256, and 32
    of their own: 1,056 x 65,536 pairs, of 4 x 32 x 128 FLOPs each at 0.593 x 989 TFLOP/s: 1.933 ms
    in a forward, so 1.760 ms are waited for, twice. In the backward those with clean keys take
    2.5 x 1,024 / 1,056 x 1.933 = 4.686 ms, longer than the gradients. 40 x 2 x 1.760 = 0.141 s.
    Late chunks are a little larger than early ones, so it is not quite that.
    """
    cell = cell_of("Nemotron 14B", 65_536)
    found, theirs = ours(cell, RATES), paper(cell, "CSBP", RATES)
    assert theirs.exposed == pytest.approx(7 * 8_192 * 4_096 * 3 * 40 / 63.6e9)
    assert found.exposed == pytest.approx(0.141, rel=0.02)
    assert found.products == theirs.products


def test_an_instant_attention_hides_nothing() -> None:
    cell = cell_of("Nemotron 14B", 65_536)
    instant = dataclasses.replace(RATES, attention=1e9)
    assert ours(cell, instant).exposed == pytest.approx(paper(cell, "CSBP", instant).exposed)


def test_at_long_context_nothing_is_waited_for() -> None:
    """As the page says."""
    for cell in CELLS:
        if cell.length >= 131_072:
            assert ours(cell, RATES).exposed == 0


# --- the page ------------------------------------------------------------------------------------


def test_the_page_is_what_the_command_writes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert PAGE.read_text() == page(*read())
    main(["--page", str(tmp_path / "paper.md")])
    assert (tmp_path / "paper.md").read_text() == PAGE.read_text()
    main(["--fit"])
    assert capsys.readouterr().out.splitlines()[0] == f"products: {RATES.products}"
    with pytest.raises(SystemExit, match="give a page that can be written"):
        main(["--page", str(tmp_path / "none" / "paper.md")])


def test_times_are_of_cells() -> None:
    """A step's seconds and tokens a second say the same: two sequences a step."""
    for model, schemes in TIMES.items():
        for scheme, times in schemes.items():
            assert 2 * LENGTH / times.step == pytest.approx(cell_of(model).tokens[scheme], rel=1e-3)
