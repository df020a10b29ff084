"""What a run prints and saves of itself: given, resolved and derived."""

import contextlib
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ranks import run_ranks

from megatron_bp.arguments.resolved import save_resolved
from megatron_bp.tools.prepare import Options, prepare

CONFIG = """
data:
  tokenizer_type: NullTokenizer
  vocab_size: 258
  null_tokenizer_eod_id: 256
  make_vocab_size_divisible_by: 128
block_diffusion:
  diffusion_block_size: 8
  mask_token_id: 257
  noise_interval: [0.05, 1]
  antithetic: true
model:
  num_layers: 3
  hidden_size: 32
  num_attention_heads: 4
  group_query_attention: true
  num_query_groups: 2
  swiglu: true
  disable_bias_linear: true
  position_embedding_type: rope
  seq_length: 61
  window_size: 7,0
training:
  global_batch_size: 4
  train_iters: 10
  lr: 1e-3
  clip_grad: 0
  eval_iters: 2
  seed: 5
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A config file, with a base, data and all."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("some words to be read " * 100)
    prefix = tmp_path / "data with space"
    prepare(Options([tmp_path / "texts"], prefix))
    (tmp_path / "base.yaml").write_text(CONFIG)
    path = tmp_path / "run.yaml"
    path.write_text(f"include: base.yaml\ndata:\n  data_path: ['{prefix}']\n  split: 1,1,0\n")
    return str(path)


def print_on_rank(rank: int, world: int, argv: list[str]) -> tuple[Any, str]:
    """(exit code, what `--print-config` prints) of a rank."""
    from megatron_bp import arguments

    written = io.StringIO()
    with contextlib.redirect_stdout(written), pytest.raises(SystemExit) as caught:
        arguments.parse([*argv, "--print-config"])
    return caught.value.code, written.getvalue()


def resolve_on_rank(rank: int, world: int, argvs: list[list[str]]) -> list[dict[str, str]]:
    """Megatron's parsed flags of each command line, and what was resolved beside them."""
    from megatron_bp.arguments.flags import full_parser
    from megatron_bp.arguments.parse import resolve

    out = []
    for argv in argvs:
        flags, length, shards = resolve(argv)
        args = vars(full_parser().parse_args(flags))
        out.append({name: repr(value) for name, value in args.items()})
        out[-1] |= {"length": str(length), "shards": str(shards)}
    return out


def given_on_rank(rank: int, world: int, argv: list[str]) -> dict[str, Any]:
    from megatron_bp.arguments.command_line import given_values
    from megatron_bp.arguments.flags import full_parser

    return given_values(argv, full_parser())


def printed(ranks: int, argv: list[str]) -> dict[str, Any]:
    """The sections of what was printed, which only the first rank does."""
    first, *others = run_ranks(ranks, print_on_rank, argv, fresh=True)
    assert [code for code, _ in (first, *others)] == [0] * ranks
    assert not any("given:" in text for _, text in others)
    text = first[1]
    sections: dict[str, Any] = yaml.safe_load(text[text.index("# what was given") :])
    assert list(sections) == ["given", "resolved", "derived"]
    return sections


MORE = [
    "--block-parallel-size",
    "2",
    "--lr=2e-3",
    "--num-layers",
    "2",
    "--bf16",
    "--eval-draws",
    "3",
]


@pytest.mark.ranks
def test_the_given_section_alone_makes_the_same_run(tmp_path: Path, config: str) -> None:
    sections = printed(2, [config, *MORE])
    given = sections["given"]
    assert (given["lr"], given["num_layers"], given["antithetic"]) == (2e-3, 2, True)
    assert "transformer_impl" not in given  # resolved, not given
    again = tmp_path / "again" / "run.yaml"
    again.parent.mkdir()
    again.write_text(yaml.safe_dump({"given": given}))
    one, two = run_ranks(1, resolve_on_rank, [[config, *MORE], [str(again)]])[0]
    assert {k: (one[k], two[k]) for k in one if one[k] != two[k]} == {}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "more",
    [
        ["--no-gradient-accumulation-fusion"],
        ["--window-size=-1,0"],
        ["--attention-backend", "flash"],
        ["--recompute-granularity", "full", "--recompute-method", "uniform"],
        ["--recompute-num-layers", "1", "--recompute-granularity=full"],
        ["--noise-interval", "0", "0.5"],
        ["--save", "a: b", "--wandb-project", "yes"],
        ["--seed", "3", "--seed", "4"],
        ["--data-path", "0.3", "a b", "0.7", "c"],
        ["--main-grads-dtype", "bf16"],
        ["--window-attn-skip-freq", "4"],
        ["--window-attn-skip-freq", "[0,1]"],
        ["--exit-signal", "SIGUSR1"],
    ],
    ids=lambda more: more[0] + more[-1],
)
def test_values_of_every_kind_come_back(tmp_path: Path, config: str, more: list[str]) -> None:
    """As flags alone: what the parser makes of the given section is what it made of the flags."""
    (given,) = run_ranks(1, given_on_rank, [config, *more])
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump({"given": given}))
    one, two = run_ranks(1, parsed_on_rank, [[config, *more], [str(again)]])[0]
    assert {k: (one[k], two[k]) for k in one if one[k] != two[k]} == {}


def parsed_on_rank(rank: int, world: int, argvs: list[list[str]]) -> list[dict[str, str]]:
    from megatron_bp.arguments.command_line import join
    from megatron_bp.arguments.flags import full_parser

    parser = full_parser()
    parsed = [vars(parser.parse_args(join(argv, parser))) for argv in argvs]
    return [{name: repr(value) for name, value in args.items()} for args in parsed]


@pytest.mark.ranks
def test_derived_numbers_by_hand(config: str) -> None:
    sections = printed(4, [config, *MORE])
    assert sections["derived"] == {
        "mode": "CSBP",
        "ranks_per_sequence": 2,
        "clean_shard_groups": 1,
        "ranks_per_clean_shard_group": 2,
        "tensor_parallel_size": 1,
        "pipeline_stages": 1,
        "data_parallel_size": 2,
        "micro_batches_per_step": 2,  # 4 rows over 2 sequences at a time
        "clean_rows_per_sequence": 56,  # up to the last block
        "corrupted_rows_per_sequence": 61,
        "rows_per_sequence_with_replicas": 117,
        # blocks of 16 rows, the last of 5: cut after blocks 1, 3 and 4 (next to 29, 58 and 88)
        "rows_per_rank": 61,  # blocks 0, 1, 5, 6 and 7; the unit of block 5 moved to the other rank
        "clean_rows_per_rank": 32,
        "units_per_sequence": 8,  # 61 / 8
        "units_per_rank": 4,
        "clean_tokens_per_step": 244,  # 4 x 61
        "true_vocabulary": 258,
        "padded_vocabulary": 384,
        "exchanged_bytes_per_row_and_layer": 64,  # K and V, 2 groups of 8, 2 bytes
        # 3 passes, 2 layers, to 1 other rank, 7 rows of 64 bytes: each rank's first rows after the
        # other's have a window of 8
        "exchange": "needed_rows",
        "exchanged_bytes_per_rank_and_sequence": 2688,
        "loss_divisor": "supervised tokens of the whole step, each term by its own count",
    }
    resolved = sections["resolved"]
    assert (resolved["num_layers"], resolved["context_parallel_size"]) == (2, 2)
    assert resolved["eval_iters"] == 6  # 2 of each of 3 draws
    assert resolved["seq_length"] == 64  # what Megatron is told


@pytest.mark.ranks
def test_tensor_and_pipeline_ranks_send_their_share(config: str) -> None:
    flags = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    flags += ["--clean-kv-exchange", "all_gather"]  # of 32 rows
    derived = printed(8, [config, *MORE, *flags])["derived"]
    assert derived["exchange"] == "all_gather"
    assert (derived["tensor_parallel_size"], derived["pipeline_stages"]) == (2, 2)
    assert (derived["ranks_per_sequence"], derived["data_parallel_size"]) == (2, 1)
    assert derived["padded_vocabulary"] == 512
    assert derived["exchanged_bytes_per_row_and_layer"] == 32  # one of two groups
    assert derived["exchanged_bytes_per_rank_and_sequence"] == 3 * 32 * 32  # one of two layers


@pytest.mark.ranks
def test_derived_numbers_of_a_single_rank(config: str) -> None:
    derived = printed(1, [config])["derived"]
    assert (derived["mode"], derived["ranks_per_sequence"]) == ("single", 1)
    assert (derived["rows_per_rank"], derived["units_per_rank"]) == (117, 8)
    assert derived["exchanged_bytes_per_row_and_layer"] == 128  # float32
    assert derived["exchanged_bytes_per_rank_and_sequence"] == 0
    assert derived["micro_batches_per_step"] == 4


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("degrees", "mode", "groups", "rows", "most", "sent"),
    [
        # units 0 to 4 with a prefix of 32, units 5 to 7 (21 rows) with one of 56
        ((2, 1), "BP", 2, 40 + 32 + 21 + 56, 77, 0),
        ((1, 2), "CP", 1, 117, 59, 59),
    ],
)
def test_derived_numbers_of_other_modes(
    config: str,
    degrees: tuple[int, int],
    mode: str,
    groups: int,
    rows: int,
    most: int,
    sent: int,
) -> None:
    bp, cp = map(str, degrees)
    argv = [config, "--block-parallel-size", bp, "--context-parallel-size", cp]
    derived = printed(2, argv)["derived"]
    assert (derived["mode"], derived["clean_shard_groups"]) == (mode, groups)
    assert derived["rows_per_sequence_with_replicas"] == rows
    assert derived["rows_per_rank"] == most
    assert derived["exchanged_bytes_per_rank_and_sequence"] == 3 * 3 * sent * 128


# Three layers of 61 rows in blocks of 8: 32 rows to the other rank by all_gather, 128 bytes each.
# By a2a 117 rows, 59 and 58: one key head of 8 and two query heads a rank, so the first rank sends
# (59 x (2 + 2) + 58 x 2) x 8 numbers of 4 bytes in a pass.
FULL = ["--recompute-granularity", "full", "--recompute-num-layers", "1", "--recompute-method"]
GATHER = ["--block-parallel-size", "2", "--clean-kv-exchange", "all_gather"]
A2A = ["--context-parallel-size", "2", "--cp-comm-type", "a2a"]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("more", "passes"),
    [
        ([], 3 * 3),
        (["--recompute-granularity", "selective"], 3 * 3),
        (["--keep-gathered-kv"], 3 * 2),
        ([*FULL, "uniform"], 3 * 3),
        (["--recompute-keep-attention", *FULL, "uniform"], 3 * 3),
        (["--keep-gathered-kv", *FULL, "block"], 3 + 2 * 2),
        (["--recompute-granularity", "selective", "--recompute-modules", "core_attn"], 3 * 3),
    ],
)
def test_passes_where_attention_is_recomputed(config: str, more: list[str], passes: int) -> None:
    derived = printed(2, [config, *GATHER, *more])["derived"]
    assert derived["exchanged_bytes_per_rank_and_sequence"] == passes * 32 * 128


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("more", "passes"),
    [
        ([], 3 * 2),
        ([*FULL, "uniform"], 3 * 3),
        ([*FULL, "block"], 3 + 2 * 2),
        (["--recompute-granularity", "selective"], 3 * 3),
        (["--recompute-granularity", "selective", "--recompute-modules", "mlp"], 3 * 2),
    ],
)
def test_passes_over_heads(config: str, more: list[str], passes: int) -> None:
    derived = printed(2, [config, *A2A, *more])["derived"]
    assert derived["exchanged_bytes_per_rank_and_sequence"] == passes * (59 * 4 + 58 * 2) * 32


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("windowed", "chunks", "sent"),
    [("[1,1,0,0]", 1, 2 * 32), ("[1,1,0,0]", 2, 32 + 7), ("[0,1,1,1]", 1, 32 + 7)],
)
def test_bytes_are_of_the_stage_that_sends_most(
    config: str, windowed: str, chunks: int, sent: int
) -> None:
    """A layer with a window of 8 sends 7 rows by needed_rows, another all of 32 by all_gather."""
    flags = ["--num-layers", "4", "--window-attn-skip-freq", windowed, "--block-parallel-size", "2"]
    flags += ["--pipeline-model-parallel-size", "2", "--needed-rows-fraction", "0.25"]
    if chunks > 1:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(chunks)]
    derived = printed(4, [config, *flags])["derived"]
    assert derived["exchanged_bytes_per_rank_and_sequence"] == 3 * sent * 128


# --- saved beside the checkpoints ----------------------------------------------------------------


def test_saved_by_the_first_rank_alone(tmp_path: Path) -> None:
    for rank in (1, 0):
        save_resolved(Namespace(save=str(tmp_path / "a" / "b"), rank=rank), f"rank: {rank}\n")
    (file,) = (tmp_path / "a" / "b").iterdir()
    assert (file.name, file.read_text()) == ("config.yaml", "rank: 0\n")


def test_a_resumed_run_replaces_it(tmp_path: Path) -> None:
    for text in ("first: 1\n", "second: 2\n"):
        save_resolved(Namespace(save=str(tmp_path), rank=0), text)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["second: 2\n"]


def test_without_a_folder_nothing_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_resolved(Namespace(save=None, rank=0), "text")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    with pytest.raises(ValueError, match=rf"--save {folder}: cannot be written \(.+\); choose"):
        save_resolved(Namespace(save=str(folder), rank=0), "text")
