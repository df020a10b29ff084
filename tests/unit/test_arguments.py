"""Config files to flags, what is derived from the flags, and what is refused by name."""

import argparse
import contextlib
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from megatron_bp import arguments
from megatron_bp.arguments.attention import aligns_chunks, attention_options
from megatron_bp.arguments.config_file import ConfigError, read_config, to_flags
from megatron_bp.arguments.flags import full_parser
from megatron_bp.attention.exchange.choose import ExchangeOptions
from megatron_bp.attention.kernels.sdpa import Sdpa
from megatron_bp.attention.kernels.tiled import Tiled
from megatron_bp.attention.layout import AttentionOptions


def write(folder: Path, **files: str) -> Path:
    """NAME.yaml of each text; the path of the first."""
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / f"{next(iter(files))}.yaml"


def small_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--swiglu", action="store_true")
    parser.add_argument("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    parser.add_argument("--reuse", action=argparse.BooleanOptionalAction)
    parser.add_argument("--data-path", nargs="*")
    parser.add_argument("--noise-interval", nargs=2, type=float)
    return parser


def flags_of(**values: Any) -> list[str]:
    return to_flags(values, small_parser(), "run.yaml")


# --- reading a config file -----------------------------------------------------------------------


def test_sections_are_joined_and_empty_ones_hold_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, run="model:\n  num_layers: 4\nempty:\ntraining:\n  lr: 0.5\n")
    assert read_config(path) == {"num_layers": 4, "lr": 0.5}


@pytest.mark.parametrize("number", ["010", "1:04", "-07", "0_17"])
def test_a_number_that_yaml_reads_otherwise_is_refused(tmp_path: Path, number: str) -> None:
    with pytest.raises(ConfigError, match=f"the number {number} could be meant in two ways"):
        read_config(write(tmp_path, run=f"a:\n  num_layers: {number}\n"))


def test_decimal_numbers_are_read(tmp_path: Path) -> None:
    text = "a: {x: 0, y: -3, z: 10, v: 0x10, w: 1_000}\n"
    want = {"x": 0, "y": -3, "z": 10, "v": 16, "w": 1000}
    assert read_config(write(tmp_path, run=text)) == want


def test_merge_keys_are_refused_with_a_way_out(tmp_path: Path) -> None:
    text = "a: &a\n  num_layers: 1\nb:\n  <<: *a\n"
    with pytest.raises(ConfigError, match="merge keys are not read; put what is shared in a file"):
        read_config(write(tmp_path, run=text))


def test_an_empty_file_holds_nothing(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, run="# nothing\n")) == {}


def test_includes_are_relative_and_overridden_by_the_file(tmp_path: Path) -> None:
    (tmp_path / "bases").mkdir()
    write(
        tmp_path / "bases", base="include: deep.yaml\na: {x: 1, y: 1}\n", deep="a: {x: 0, z: 0}\n"
    )
    path = write(tmp_path, run="b: {y: 2}\ninclude: bases/base.yaml\n")
    assert read_config(path) == {"x": 1, "y": 2, "z": 0}


def test_of_a_list_of_includes_the_later_wins(tmp_path: Path) -> None:
    path = write(
        tmp_path, run="include: [one.yaml, two.yaml]\n", one="a: {x: 1, y: 1}\n", two="a: {x: 2}\n"
    )
    assert read_config(path) == {"x": 2, "y": 1}


def test_a_file_may_be_included_twice_when_it_is_no_circle(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        run="include: [one.yaml, two.yaml]\n",
        one="include: base.yaml\n",
        two="include: base.yaml\n",
        base="a: {x: 1}\n",
    )
    assert read_config(path) == {"x": 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("include: run.yaml\n", "includes itself (run.yaml -> run.yaml)"),
        ("include: other.yaml\n", "includes itself (run.yaml -> other.yaml -> run.yaml)"),
        ("include: nowhere.yaml\n", "nowhere.yaml: cannot be read (No such file"),
        ("include: 5\n", "`include: 5`: must be a file name or a list of them"),
        ("include: [other.yaml, 5]\n", "must be a file name or a list of them"),
        ("a: {x: 1}\nb: {x: 1}\n", "x is given twice"),
        ("a:\n  x: 1\n  x: 2\n", "x twice"),
        ("a: {x: 1}\na: {y: 1}\n", "a twice"),
        ("num_layers: 4\n", "`num_layers: 4` stands outside any section"),
        ("a: [1, 2]\n", "stands outside any section"),
        ("- a\n- b\n", "holds a list, not a mapping"),
        ("just words\n", "holds a str, not a mapping"),
        ("a: {x: 1\n", "is not valid YAML"),
        ("a: {5: 1}\n", "the key 5 is not a name"),
        ("a: !!python/object:os.system {}\n", "is not valid YAML"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, run=text, other="include: run.yaml\n")
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.yaml: cannot be read \(No such file"):
        read_config(tmp_path / "no.yaml")


@pytest.mark.parametrize("text", [b"a: {x: \xe9}\n", b"a:\n  ? [1, 2]\n  : 3\n"])
def test_bytes_and_keys_that_yaml_cannot_take_name_the_file(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "run.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        read_config(tmp_path / "run.yaml")


# --- to flags ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "flags"),
    [
        ({"num_layers": 4}, ["--num-layers=4"]),
        ({"num_layers": None}, []),
        ({"swiglu": True}, ["--swiglu"]),
        ({"swiglu": False}, []),
        ({"disable_bias_linear": True}, ["--disable-bias-linear"]),
        ({"reuse": True}, ["--reuse"]),
        ({"reuse": False}, ["--no-reuse"]),
        ({"data_path": [0.3, "a", 0.7, "b"]}, ["--data-path", "0.3", "a", "0.7", "b"]),
        ({"data_path": "a b"}, ["--data-path", "a", "b"]),
        ({"data_path": ["with space"]}, ["--data-path", "with space"]),
        ({"noise_interval": [1e-3, 1]}, ["--noise-interval", "0.001", "1"]),
        ({"num_layers": -1}, ["--num-layers=-1"]),
    ],
)
def test_values_become_flags(values: dict[str, Any], flags: list[str]) -> None:
    assert flags_of(**values) == flags
    small_parser().parse_args(flags)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_layer": 4}, "unknown key `num_layer`; did you mean `num_layers`?"),
        ({"num-layers": 4}, "unknown key `num-layers`; did you mean `num_layers`?"),
        ({"zzzzzz": 4}, "unknown key `zzzzzz`"),
        ({5: 4}, "unknown key `5`"),
        ({"swiglu": "yes"}, "`swiglu: yes`: is a switch; write true or false"),
        ({"swiglu": 1}, "is a switch; write true or false"),
        ({"num_layers": [1, 2]}, "takes one value, not a list"),
        ({"num_layers": True}, "takes a value, not True"),
        ({"data_path": True}, "takes a value, not True"),
        ({"num_layers": {"a": 1}}, "takes a value, not {'a': 1}"),
    ],
)
def test_what_is_no_flag_is_told(values: dict[Any, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        to_flags(values, small_parser(), "run.yaml")
    assert str(caught.value).startswith("run.yaml: ")
    assert words in str(caught.value)


def test_a_key_like_nothing_gets_no_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"unknown key `zzzzzz`$"):
        flags_of(zzzzzz=4)


def test_numbers_with_an_exponent_reach_the_flag(tmp_path: Path) -> None:
    values = read_config(write(tmp_path, run="a: {lr: 1e-3, noise_interval: [1e-3, 1]}\n"))
    parsed = small_parser().parse_args(to_flags(values, small_parser(), "run.yaml"))
    assert (parsed.lr, parsed.noise_interval) == (1e-3, [1e-3, 1.0])


# --- what is derived: with Megatron's own parser, in a process where it can be imported ----------

Outcome = tuple[dict[str, Any], int, int] | str


def resolve_on_rank(
    rank: int, world: int, argv: list[str], world_size: int | None = None
) -> Outcome:
    """(Megatron's parsed flags, row length, CP in our sense), or the message of the refusal."""
    try:
        flags, length, clean_shard_size = arguments.resolve(argv, world_size)
    except (arguments.RefusedError, arguments.ConfigError) as error:
        return str(error)
    args = vars(full_parser().parse_args(flags))
    plain = (int, float, str, bool, list, type(None))
    return {k: v for k, v in args.items() if isinstance(v, plain)}, length, clean_shard_size


def parse_on_rank(rank: int, world: int, argv: list[str]) -> tuple[Any, str]:
    """The exit code of `parse` and what it wrote to stderr."""
    written = io.StringIO()
    with contextlib.redirect_stderr(written), pytest.raises(SystemExit) as caught:
        arguments.parse(argv)
    return caught.value.code, written.getvalue()


def outcome(argv: list[str], world_size: int | None = None) -> Outcome:
    return run_ranks(1, resolve_on_rank, argv, world_size)[0]


@pytest.fixture
def data(tmp_path: Path) -> str:
    for ending in ("bin", "idx"):
        (tmp_path / f"data.{ending}").touch()
    return str(tmp_path / "data")


def base(data: str, *flags: str) -> list[str]:
    """A command line that is accepted, and more flags."""
    return ["--mask-token-id", "257", "--seq-length", "64", "--data-path", data, *flags]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("flags", "slot", "clean_shard_size"),
    [
        ("", 1, 1),
        ("--block-parallel-size 4", 4, 4),
        ("--block-parallel-size 4 --context-parallel-size 4", 4, 4),
        ("--block-parallel-size=2 --context-parallel-size=2", 2, 2),
        ("--context-parallel-size 1", 1, 1),
        ("--block-parallel-size 2 --context-parallel-size 1", 2, 1),
        ("--block-parallel-size 6 --context-parallel-size 3", 6, 3),
        ("--context-parallel-size 2", 2, 2),
        ("--context-parallel-size 3 --cp-comm-type all_gather", 3, 3),
    ],
)
def test_megatrons_context_parallel_size_is_the_slot(
    data: str, flags: str, slot: int, clean_shard_size: int
) -> None:
    args, _, got = outcome(base(data, *flags.split()))
    assert (args["context_parallel_size"], got) == (slot, clean_shard_size)
    assert args["block_parallel_size"] == (slot if "--block" in flags else 1)
    assert args["cp_comm_type"] == ["p2p"]  # Megatron's default, whatever ours is
    assert args["bdlm_cp_comm_type"] == "all_gather"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("length", "ranks", "rounded"), [(64, 1, 64), (63, 1, 64), (61, 4, 64), (65, 4, 72)]
)
def test_megatron_gets_a_length_it_can_cut(
    data: str, length: int, ranks: int, rounded: int
) -> None:
    argv = base(data, "--seq-length", str(length), "--block-parallel-size", str(ranks))
    args, real, _ = outcome(argv)
    assert (args["seq_length"], real) == (rounded, length)
    assert args["max_position_embeddings"] == rounded


@pytest.mark.ranks
def test_defaults_that_fit_block_diffusion(data: str) -> None:
    args, _, _ = outcome(base(data))
    assert (args["attention_dropout"], args["hidden_dropout"]) == (0.0, 0.0)
    assert (args["micro_batch_size"], args["transformer_impl"]) == (1, "local")
    assert args["calculate_per_token_loss"] is True
    assert args["distributed_backend"] == "gloo"
    assert args["eval_interval"] == 1000, "Megatron divides by it"


@pytest.mark.ranks
def test_the_command_line_wins_over_the_file(tmp_path: Path, data: str) -> None:
    path = write(
        tmp_path,
        run="a: {mask_token_id: 257, seq_length: 64, block_parallel_size: 2, seed: 3}\n"
        f"b: {{data_path: [{data}]}}\n",
    )
    args, length, _ = outcome([str(path), "--seq-length", "32", "--block-parallel-size", "4"])
    assert (length, args["seq_length"], args["context_parallel_size"]) == (32, 32, 4)
    assert args["seed"] == 3


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["test_data_path", "valid_data_path"])
def test_weights_of_a_blend_are_no_files(tmp_path: Path, data: str, name: str) -> None:
    path = write(
        tmp_path,
        run="a: {mask_token_id: 257, seq_length: 64}\n"
        f"b: {{train_data_path: [{data}], {name}: [0.3, {data}, 0.7, {data}]}}\n",
    )
    assert isinstance(outcome([str(path)]), tuple)


@pytest.mark.ranks
def test_an_unknown_key_names_megatrons_flag(tmp_path: Path) -> None:
    path = write(tmp_path, run="model: {num_layer: 4}\n")
    assert outcome([str(path)]) == f"{path}: unknown key `num_layer`; did you mean `num_layers`?"


@pytest.mark.ranks
def test_an_unknown_flag_is_told_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, hint in (
        (["--block-paralel-size=2"], "; did you mean --block-parallel-size?\n"),
        (["--xyzzy", "2"], "unrecognized arguments: --xyzzy 2\n"),
    ):
        with pytest.raises(SystemExit):
            arguments.resolve(flags)
        assert hint in capsys.readouterr().err


def test_help_prints_every_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        arguments.resolve(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert text.startswith("usage: pretrain_bdlm.py [CONFIG.yaml]")
    assert "\nblock diffusion:\n  --block-parallel-size" in text
    assert "(e.g. 1.10 = 10%)." in text, "Megatron's own text with a bare % stands as it is"


def test_two_files_are_refused(tmp_path: Path) -> None:
    one, two = write(tmp_path, one="", two=""), tmp_path / "two.yaml"
    assert "two files given" in str(outcome([str(one), str(two)]))


@pytest.mark.ranks
def test_an_evaluation_reads_each_draw(data: str) -> None:
    args, _, _ = outcome(base(data, "--eval-iters", "5", "--eval-draws", "3"))
    assert args["eval_iters"] == 15
    assert outcome(base(data, "--eval-iters", "5"))[0]["eval_iters"] == 5


@pytest.mark.ranks
@pytest.mark.parametrize(("mode", "megatron_stops"), [("stop", True), ("skip", False)])
def test_megatrons_own_check_stops_unless_steps_are_skipped(
    data: str, mode: str, megatron_stops: bool
) -> None:
    args, _, _ = outcome(base(data, "--on-nonfinite", mode))
    assert args["check_for_nan_in_loss_and_grad"] is megatron_stops


@pytest.mark.ranks
@pytest.mark.parametrize(
    "flags",
    [
        "--ar-loss-weight 1 --clean-relation token",
        "--diffusion-loss-weight 0 --ar-loss-weight 1 --clean-relation token",
        "--noise uniform --noise-per document --noise-schedule cosine --loss-weighting inverse_p",
        "--antithetic",
    ],
)
def test_objectives_that_are_accepted(data: str, flags: str) -> None:
    assert isinstance(outcome(base(data, *flags.split())), tuple)


def settings_on_rank(
    rank: int, world: int, flags: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The objective and step settings of flags, beside what Megatron would add."""
    args = full_parser().parse_args(flags)
    args.bdlm_clean_shard_size, args.bdlm_vocabulary = 1, 258
    args.kv_channels, args.ffn_hidden_size, args.params_dtype = 8, 64, torch.float32
    settings = arguments.settings(args)
    return vars(settings.objective), vars(settings.sequence)


def attention_on_rank(rank: int, world: int, flags: list[str]) -> tuple[AttentionOptions, bool]:
    """The attention options of flags, and whether chunks are aligned to blocks."""
    args = full_parser().parse_args(flags)
    args.bdlm_clean_shard_size = args.context_parallel_size
    args.kv_channels, args.params_dtype = 8, torch.float32
    return attention_options(args), aligns_chunks(args)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("flags", "wanted", "aligned"),
    [
        ("", AttentionOptions(Sdpa()), False),
        (
            "--block-parallel-size 2 --context-parallel-size 2 --clean-kv-exchange ring "
            "--attention-kernel tiled --keep-gathered-kv",
            AttentionOptions(Tiled(), ExchangeOptions("ring"), keep_gathered=True),
            False,
        ),
        (
            "--clean-kv-rows 7 --needed-rows-fraction 0.5 --recompute-keep-attention",
            AttentionOptions(Sdpa(), ExchangeOptions("auto", 7, 0.5), keep_results=True),
            False,
        ),
        (
            "--context-parallel-size 2",
            AttentionOptions(Sdpa(), ExchangeOptions("all_gather")),
            False,
        ),
        (
            "--context-parallel-size 2 --cp-comm-type p2p",
            AttentionOptions(Sdpa(), ExchangeOptions("ring")),
            False,
        ),
        (
            "--context-parallel-size 2 --cp-comm-type a2a",
            AttentionOptions(Sdpa(), ExchangeOptions("all_gather"), over_heads=True),
            False,
        ),
        (
            "--context-parallel-size 2 --cp-comm-type clean_all_gather",
            AttentionOptions(Sdpa(), ExchangeOptions("all_gather")),
            True,
        ),
    ],
)
def test_attention_flags_reach_it(flags: str, wanted: AttentionOptions, aligned: bool) -> None:
    assert run_ranks(1, attention_on_rank, flags.split())[0] == (wanted, aligned)


@pytest.mark.ranks
def test_every_flag_of_the_objective_reaches_it() -> None:
    flags = (
        "--mask-token-id 257 --num-attention-heads 4 --hidden-size 32 --seed 9 --noise uniform "
        "--noise-per block --noise-schedule cosine --noise-interval 0.1 0.9 --antithetic "
        "--loss-weighting inverse_p --diffusion-loss-weight 0.3 --ar-loss-weight 0.7 "
        "--clean-relation token --never-corrupt-ids 3 4 --alignment next --scored-tokens all "
        "--loss-count joint --ar-scored-tokens all --self-conditioning 0.5 --corrupted-copies 3 "
        "--block-grid response --response-end refuse --window-anchor block "
        "--max-imbalance 1.25"
    )
    assert run_ranks(1, settings_on_rank, flags.split())[0] == (
        {
            "mask_token_id": 257,
            "vocabulary": 258,
            "seed": 9,
            "noise": "uniform",
            "noise_per": "block",
            "schedule": "cosine",
            "interval": (0.1, 0.9),
            "antithetic": True,
            "weighting": "inverse_p",
            "diffusion_weight": 0.3,
            "ar_weight": 0.7,
            "complementary": False,
            "never_corrupt": (3, 4),
            "alignment": "next",
            "scored": "all",
            "count": "joint",
            "exclude_mask_logit": False,
            "ar_scored": "all",
            "self_conditioning": 0.5,
        },
        {
            "block_size": 32,
            "block_parallel_size": 1,
            "context_parallel_size": 1,
            "clean_relation": "token",
            "own_relation": "bidirectional",
            "row_cost": 128,
            "score_clean": "all",
            "grid": "response",
            "response_end": "refuse",
            "alignment": "next",
            "copies": 3,
            "window_anchor": "block",
            "max_imbalance": 1.25,
            "align_chunks": False,
        },
    )


@pytest.mark.ranks
def test_a_nan_in_an_evaluation_alone_has_a_step(tmp_path: Path) -> None:
    """`--skip-train`: Megatron then never sets the step that runs."""
    assert run_ranks(1, step_of_evaluation, str(tmp_path))[0] in (6, 7)


def step_of_evaluation(rank: int, world: int, folder: str) -> int:
    watch = arguments.nonfinite(Namespace(on_nonfinite="stop", save=folder, iteration=6))
    return watch._iteration()


# --- what is refused -----------------------------------------------------------------------------

REFUSED = [
    ("--complementary-copies --corrupted-copies 3 --loss-weighting one", "copies come in pairs"),
    ("--corrupted-copies 0", "--corrupted-copies 0: must be at least 1"),
    ("--objective nemotron --clean-relation block", "use --clean-relation token"),
    ("--block-parallel-size 4 --context-parallel-size 3", "CP must be 1, BP or a divisor of BP"),
    ("--block-parallel-size 2 --context-parallel-size 4", "CP must be 1, BP or a divisor of BP"),
    ("--block-parallel-size 0", "parallel degrees must be at least 1, got BP 0"),
    ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size 0: must be at least 1"),
    (
        "--tensor-model-parallel-size 3 --num-attention-heads 4",
        "--num-attention-heads 4 with --tensor-model-parallel-size 3",
    ),
    (
        "--tensor-model-parallel-size 4 --num-attention-heads 4 --group-query-attention "
        "--num-query-groups 2",
        "--num-query-groups 2 with --tensor-model-parallel-size 4",
    ),
    (
        "--tensor-model-parallel-size 2 --ffn-hidden-size 51",
        "--ffn-hidden-size 51 with --tensor-model-parallel-size 2",
    ),
    ("--sequence-parallel", "--sequence-parallel needs --tensor-model-parallel-size above 1"),
    ("--defer-embedding-wgrad-compute", "--defer-embedding-wgrad-compute: the gradient"),
    ("--tp-comm-overlap", "--tp-comm-overlap: its buffers have one size"),
    ("--use-tp-pp-dp-mapping", "--use-tp-pp-dp-mapping: ranks of a sequence"),
    ("--pipeline-model-parallel-size 0", "--pipeline-model-parallel-size 0: must be at least 1"),
    (
        "--pipeline-model-parallel-size 3 --num-layers 2",
        "--num-layers 2 with --pipeline-model-parallel-size 3",
    ),
    ("--num-virtual-stages-per-pipeline-rank 2", "cut a pipeline stage in chunks"),
    ("--num-virtual-stages-per-pipeline-rank 0", "rank 0: must be at least 1"),
    ("--num-layers-per-virtual-pipeline-stage 0", "stage 0: must be at least 1"),
    (
        "--pipeline-model-parallel-size 2 --num-layers 2 --num-layers-per-virtual-pipeline-stage 2",
        "makes 1 layers a stage",
    ),
    ("--hybrid-context-parallel", "--hybrid-context-parallel"),
    ("--hierarchical-context-parallel-sizes 2 2", "--hierarchical-context-parallel-sizes"),
    ("--use-megatron-fsdp", "--use-megatron-fsdp: not implemented"),
    ("--use-torch-fsdp2", "--use-torch-fsdp2: not implemented"),
    ("--micro-batch-size 0", "--micro-batch-size 0: must be at least 1"),
    ("--transformer-impl transformer_engine", "transformer_engine: its layers run on GPUs alone"),
    ("--transformer-impl inference_optimized", "use local or transformer_engine"),
    ("--apply-layernorm-1p", "--apply-layernorm-1p: the local layers"),
    ("--spec a b", "--spec ['a', 'b']"),
    ("--attention-backend local", "--attention-backend local"),
    ("--attention-backend flash", "--attention-backend flash: chooses among"),
    ("--cross-entropy-loss-fusion", "--cross-entropy-loss-fusion"),
    ("--check-for-spiky-loss", "--check-for-spiky-loss"),
    ("--recompute-granularity selective --recompute-modules layernorm", "modules layernorm"),
    ("--bf16 --fp32-residual-connection", "--fp32-residual-connection with --bf16"),
    ("--train-iters 3 --train-samples 6", "--train-samples 6 with --train-iters 3"),
    ("--dataloader-type cyclic", "--dataloader-type cyclic: rows come from"),
    ("--attention-dropout 0.1", "--attention-dropout 0.1"),
    ("--hidden-dropout 0.1", "--hidden-dropout 0.1"),
    ("--mtp-num-layers 1", "--mtp-num-layers 1: multi-token prediction"),
    ("--multi-latent-attention", "--multi-latent-attention"),
    ("--experimental-attention-variant dsa", "--experimental-attention-variant dsa"),
    ("--cuda-graph-impl local", "CUDA graphs"),
    ("--enable-cuda-graph", "CUDA graphs"),
    ("--external-cuda-graph", "CUDA graphs"),
    ("--softmax-type off-by-one", "--softmax-type off-by-one"),
    ("--position-embedding-type mrope", "--position-embedding-type mrope"),
    ("--query-scale-beta 0.1", "--query-scale-length None: the scale has both numbers"),
    ("--query-scale-beta 0 --query-scale-length 9", "--query-scale-beta 0.0: must be above 0"),
    ("--max-position-embeddings 63", "--max-position-embeddings 63: the table"),
    ("--fp16", "--fp16: the loss head"),
    ("--use-mup", "--use-mup"),
    ("--hybrid-layer-pattern M-M*", "hybrid (Mamba) models"),
    ("--is-hybrid-model", "hybrid (Mamba) models"),
    ("--window-size=-1,0", "--window-size (-1, 0)"),
    ("--fp8-format e4m3", "--fp8-format"),
    ("--diffusion-block-size 0", "--diffusion-block-size 0: must be at least 1"),
    ("--seq-length 0", "--seq-length 0"),
    (
        "--context-parallel-size 4 --cp-comm-type a2a --num-attention-heads 6 --kv-channels 8",
        "--cp-comm-type a2a over 4 ranks with 6 query and 6 key heads a tensor-parallel rank",
    ),
    (
        "--context-parallel-size 4 --cp-comm-type a2a --num-attention-heads 12 --kv-channels 8 "
        "--group-query-attention --num-query-groups 3",
        "with 12 query and 3 key heads",
    ),
    ("--context-parallel-size 2 --cp-comm-type a2a --keep-gathered-kv", "no K/V are gathered"),
    ("--context-parallel-size 2 --cp-comm-type a2a --clean-kv-rows 9", "no K/V are gathered"),
    ("--context-parallel-size 2 --clean-kv-exchange ring", "and this run is mode CP"),
    ("--block-parallel-size 2 --clean-kv-exchange ring --clean-kv-rows 9", "one rank at a time"),
    ("--context-parallel-size 2 --cp-comm-type p2p --clean-kv-rows 9", "one rank at a time"),
    (
        "--keep-gathered-kv --recompute-granularity full --recompute-method uniform",
        "--keep-gathered-kv: attention is recomputed in every layer",
    ),
    (
        "--keep-gathered-kv --recompute-granularity selective --recompute-modules core_attn",
        "--keep-gathered-kv: attention is recomputed in every layer",
    ),
    ("--clean-kv-rows 0", "--clean-kv-rows 0: must be at least 1"),
    ("--needed-rows-fraction 1.5", "--needed-rows-fraction 1.5: must be from 0 to 1"),
    ("--recompute-keep-attention", "set --recompute-granularity full"),
    ("--cp-comm-type all_gather", "says how mode CP exchanges"),
    ("--block-parallel-size 2 --cp-comm-type=all_gather", "and this run is CSBP"),
    ("--multiple-validation-sets", "--multiple-validation-sets"),
    ("--sft", "--sft"),
    ("--mock-data", "--mock-data"),
    ("--eval-micro-batch-size 2", "--eval-micro-batch-size 2: standard errors need the loss"),
    ("--window-size 4,3", "tokens to the right, must be 0"),
    ("--qk-l2-norm", "--qk-l2-norm"),
    ("--rotary-percent 1.5", "--rotary-percent 1.5: must be above 0"),
    ("--eod-mask-loss", "--eod-mask-loss"),
    ("--reset-position-ids", "--reset-position-ids"),
    ("--reset-attention-mask", "--reset-attention-mask"),
    ("--fim-data", "--fim-data"),
    ("--full-validation", "--full-validation"),
    ("--dataloader-type external", "--dataloader-type external"),
    ("--save here", "without --save-interval"),
    ("--train-iters 0", "--train-iters 0: must be at least 1"),
    ("--global-batch-size 0", "--global-batch-size 0: must be at least 1"),
    ("--ar-loss-weight 0.5", "--ar-loss-weight 0.5 with --clean-relation block"),
    ("--ar-loss-weight 1 --clean-relation block", "use --clean-relation token"),
    ("--eval-draws 0", "--eval-draws 0: must be at least 1"),
    ("--max-imbalance 0.9", "--max-imbalance 0.9: must be at least 1"),
    ("--max-imbalance inf", "--max-imbalance inf: must be a finite number"),
    ("--valid-data-path no/such", "--data-path and --valid-data-path: each says where all"),
    ("--per-split-data-args-path no.json", "--data-path and --per-split-data-args-path"),
    ("--seed 0", "--seed 0: must be at least 1 and below 2^32"),
    ("--seed 4294967296", "--seed 4294967296: must be"),
    ("--split a,b", "--split a,b: must be numbers"),
    ("--split 80,20,0,5", "--split 80,20,0,5: must be at most three"),
    ("--split 0,0,0", "--split 0,0,0: must not be all zero"),
    ("--split nan,1,1", "--split nan,1,1: must be at most three numbers, none negative"),
    ("--split=", "--split : must be numbers"),
    ("--eval-interval 0", "--eval-interval 0: must be at least 1"),
    ("--log-interval 0", "--log-interval 0: must be at least 1"),
    ("--eval-global-batch-size=-1", "--eval-global-batch-size -1: must be at least 1"),
    ("--num-layers 0", "--num-layers 0: must be at least 1"),
    ("--diffusion-block-size 2147483648", "--diffusion-block-size 2147483648: must be below"),
    ("--clip-grad nan", "--clip-grad nan: must be a finite number"),
    ("--lr inf", "--lr inf: must be a finite number"),
    ("--noise-interval 0 nan", "--noise-interval [0.0, nan]: must be a finite number"),
    ("--adam-beta1 2", "--adam-beta1 2.0: must be below 1"),
    ("--rotary-base 0", "--rotary-base 0: must be at least 1"),
    ("--ckpt-step 0", "--ckpt-step 0: must be at least 1"),
    ("--exit-signal SIGKILL", "--exit-signal SIGKILL: no process can act on it"),
    ("--exit-signal FOO", "'FOO' is not a value of its flag"),
    ("--lr-warmup-iters 9 --train-iters 9", "--lr-warmup-iters 9: must be below the 9 steps"),
    ("--optimizer muon", "--optimizer muon: not implemented"),
    ("--wandb-project mine", "--wandb-project mine needs --wandb-exp-name"),
    ("--apply-residual-connection-post-layernorm", "megatron-core's layers do not read it"),
    ("--iterations-to-skip 2", "--iterations-to-skip: a skipped step would leave no row"),
    ("--init-method-xavier-uniform", "--init-method-xavier-uniform: fails in Megatron"),
    (
        "--hidden-size 8 --num-attention-heads 4 --group-query-attention --num-query-groups 3",
        "--num-query-groups 3: 4 query heads",
    ),
    ("--hidden-size 10 --num-attention-heads 4", "--hidden-size 10 with --num-attention-heads 4"),
    (
        "--hidden-size 28 --num-attention-heads 4 --position-embedding-type rope",
        "rotary turns pairs of 7 channels",
    ),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("flags", "words"), REFUSED, ids=[flags for flags, _ in REFUSED])
def test_refused(data: str, flags: str, words: str) -> None:
    message = outcome(base(data, *flags.split()))
    assert isinstance(message, str), "accepted"
    assert words in message


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("without", "words"),
    [
        ("--mask-token-id", "--mask-token-id is not set"),
        ("--data-path", "no data: give --data-path"),
    ],
)
def test_refused_without(data: str, without: str, words: str) -> None:
    argv = base(data)
    at = argv.index(without)
    message = outcome(argv[:at] + argv[at + 2 :])
    assert isinstance(message, str), "accepted"
    assert words in message


DEGREES = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --block-parallel-size 2"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("flags", "world_size", "words"),
    [
        ("", 1, None),
        ("--block-parallel-size 2 --global-batch-size 6", 4, None),
        ("--block-parallel-size 2", 1, "1 ranks were started, and 2 work on a sequence"),
        ("--block-parallel-size 2", 3, "start a multiple of 2"),
        ("--block-parallel-size 2 --global-batch-size 5", 4, "make it a multiple of 2"),
        (f"{DEGREES} --global-batch-size 2", 16, None),
        (DEGREES, 4, "4 ranks were started, and 8 work on a sequence"),
        (DEGREES, 12, "start a multiple of 8"),
        (f"{DEGREES} --global-batch-size 3", 16, "make it a multiple of 2"),
        (
            f"{DEGREES} --num-layers 4 --num-virtual-stages-per-pipeline-rank 2 "
            f"--global-batch-size 6",
            16,
            "make it a multiple of 4",
        ),
    ],
)
def test_degrees_are_held_against_the_ranks_that_were_started(
    data: str, flags: str, world_size: int, words: str | None
) -> None:
    got = outcome(base(data, *flags.split()), world_size)
    assert isinstance(got, tuple) if words is None else words in str(got)


def data_flags(data: str, *flags: str) -> list[str]:
    """The base command line with other data flags."""
    argv = base(data)
    at = argv.index("--data-path")
    return [*argv[:at], *argv[at + 2 :], *flags]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("data-args-path", "0.5 {data} 0.5 no/such", "no/such.bin: no such file"),
        ("data-args-path", None, "cannot be read"),
        ("data-args-path", "", "no data: give --data-path"),
        ("per-split-data-args-path", "not json", "is not JSON"),
        ("per-split-data-args-path", '{{"train": "a"}}', "must be an object with train, valid"),
        ("per-split-data-args-path", '{{"train": 1, "valid": "", "test": ""}}', "`train` must be"),
        (
            "per-split-data-args-path",
            '{{"train": "{data}", "valid": ["1.0", "no/such"], "test": ""}}',
            "no/such.bin: no such file",
        ),
    ],
)
def test_data_named_in_a_file_is_checked_too(
    data: str, tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    path = tmp_path / "args.txt"
    if content is not None:
        path.write_text(content.format(data=data))
    assert words in str(outcome(data_flags(data, f"--{name}", str(path))))


@pytest.mark.ranks
def test_data_named_in_a_file_is_taken(data: str, tmp_path: Path) -> None:
    (tmp_path / "args.txt").write_text(f"0.5 {data}")
    flags = data_flags(data, "--data-args-path", str(tmp_path / "args.txt"))
    assert isinstance(outcome(flags), tuple)


@pytest.mark.ranks
@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_a_missing_data_file_is_told(data: str, ending: str) -> None:
    Path(f"{data}.{ending}").unlink()
    assert f"{data}.{ending}: no such file" in str(outcome(base(data)))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--fp16", "pretrain_bdlm.py: error: --fp16: the loss head"),
        ("no.yaml", "no.yaml: cannot be read"),
        ("--num-layer 4", "unrecognized arguments: --num-layer 4"),
    ],
)
def test_bad_input_exits_with_two_and_one_clear_line(data: str, flags: str, line: str) -> None:
    argv = flags.split() if flags == "no.yaml" else base(data, *flags.split())
    code, written = run_ranks(1, parse_on_rank, argv)[0]
    assert code == 2
    assert line in written
    assert "Traceback" not in written
    assert len([x for x in written.splitlines() if "error" in x]) == 1


MODEL = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --train-iters 1 --lr 1 "
    "--vocab-size 258 --tokenizer-type NullTokenizer --null-tokenizer-eod-id 256 "
)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--metrics-file /proc/metrics.jsonl", "--metrics-file /proc/metrics.jsonl: cannot be"),
        ("--metrics-file /", "--metrics-file /: cannot be written (Is a directory)"),
        ("--recompute-granularity selective --recompute-modules nonsense", "nonsense"),
        ("--complementary-copies --corrupted-copies 2", "use --loss-weighting one"),
        ("--corrupted-copies 300", "--corrupted-copies 300: must be from 1 to 256"),
        ("--exclude-mask-logit --noise uniform", "no token is masked"),
        ("--self-conditioning 1.5", "is a probability, from 0 to 1"),
        ("--never-corrupt-ids 4 9999", "--never-corrupt-ids 9999: must be ids of the true"),
        ("--objective bd3lm", "invalid choice: 'bd3lm'"),
    ],
)
def test_what_only_the_model_or_the_disk_refuses_is_told_at_the_start(
    data: str, flags: str, line: str
) -> None:
    code, written = run_ranks(1, parse_on_rank, base(data, *(MODEL + flags).split()), fresh=True)[0]
    assert code == 2
    assert line in written
    assert "Traceback" not in written
