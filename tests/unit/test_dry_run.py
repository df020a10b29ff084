"""`pretrain_bdlm.py --dry-run`: shapes and counts by hand, what it refuses, what it leaves alone.

All command lines run in one process of their own, which hides its GPUs and replaces torch's.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_bp.tools.prepare import Options, prepare

ROOT = Path(__file__).parents[2]
CONFIG = """
data:
  data_path: [nowhere/words]
  tokenizer_type: NullTokenizer
  vocab_size: 258
  null_tokenizer_eod_id: 256
  make_vocab_size_divisible_by: 2
block_diffusion:
  diffusion_block_size: 8
  mask_token_id: 257
model:
  num_layers: 4
  hidden_size: 32
  num_attention_heads: 4
  group_query_attention: true
  num_query_groups: 2
  ffn_hidden_size: 48
  swiglu: true
  normalization: RMSNorm
  disable_bias_linear: true
  position_embedding_type: rope
  seq_length: 64
training:
  global_batch_size: 4
  train_iters: 10
  lr: 1e-3
"""
EXPERTS = """
include: run.yaml
experts:
  num_experts: 4
  expert_model_parallel_size: 2
  moe_router_topk: 2
  moe_ffn_hidden_size: 24
"""
CSBP = ["--block-parallel-size", "2"]


@dataclass
class Case:
    """A command line after its config file, and the environment."""

    flags: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    config: str = "run.yaml"
    dry: bool = True


@dataclass
class Outcome:
    """What became of it."""

    code: Any
    out: str
    error: str
    facts: dict[str, Any]


CASES = {
    "one rank": Case(),
    "csbp": Case(CSBP),
    "real data": Case([*CSBP, "--data-path", "words"]),
    "tp 2 pp 2": Case(
        [
            "--tensor-model-parallel-size",
            "2",
            "--pipeline-model-parallel-size",
            "2",
            "--num-virtual-stages-per-pipeline-rank",
            "2",
        ]
    ),
    "experts": Case(CSBP, config="experts.yaml"),
    "self-conditioning, untied, biases": Case(
        [
            "--self-conditioning",
            "0.5",
            "--self-conditioning-width",
            "16",
            "--add-qkv-bias",
            "--untie-embeddings-and-output-weights",
        ]
    ),
    "hybrid": Case(
        ["--block-parallel-size", "4", "--context-parallel-size", "2"], {"WORLD_SIZE": "8"}
    ),
    "two ranks asked for": Case([*CSBP, "--dry-run-world-size", "2"], {"WORLD_SIZE": "8"}),
    "another rank": Case(CSBP, {"WORLD_SIZE": "2", "RANK": "1"}),
    "for gpus": Case(
        [
            "--transformer-impl",
            "transformer_engine",
            "--bf16",
            "--attention-kernel",
            "flash_fa3",
            "--load",
            "none",
            "--save",
            "none",
            "--save-interval",
            "5",
            "--tensorboard-dir",
            "board",
            "--metrics-file",
            "m/metrics.jsonl",
        ]
    ),
    "with equals signs": Case(["--transformer-impl=local", "--tensorboard-dir=board"]),
    "no ranks": Case(["--dry-run-world-size", "0"]),
    "in a file": Case(["--data-path", "words"], config="dry.yaml", dry=False),
    "alone": Case(["--dry-run-json", "x", "--data-path", "words"], dry=False),
    "alone, with an equals sign": Case(
        ["--dry-run-world-size=1", "--data-path", "words"], dry=False
    ),
}
REFUSED = {  # a run of it is refused with the same words
    "world": Case([*CSBP, "--data-path", "words"], {"WORLD_SIZE": "3"}),
    "vocabulary": Case(["--mask-token-id", "300", "--data-path", "words"]),
    "megatron": Case(["--num-layers", "0", "--data-path", "words"]),
}


def act(case: Case, number: int) -> Outcome:
    """Runs the entry with it, in this process."""
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.training import global_vars

    import pretrain_bdlm

    for name in ("WORLD_SIZE", "RANK"):
        os.environ.pop(name, None)
    os.environ |= case.environment
    argv, told = [case.config, *case.flags], Path(f"../{number}.json")
    if case.dry:
        argv += ["--dry-run", "--dry-run-json", str(told)]
    else:  # as torchrun starts it
        os.environ |= {"RANK": "0", "WORLD_SIZE": case.environment.get("WORLD_SIZE", "1")}
    out, error, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            pretrain_bdlm.main(argv)
        except SystemExit as end:
            code = end.code
        finally:
            global_vars.unset_global_variables()
            destroy_num_microbatches_calculator()
    facts = json.loads(told.read_text()) if told.exists() else {}
    lines = [line for line in error.getvalue().splitlines() if "error:" in line]
    return Outcome(code, out.getvalue(), "\n".join(lines), facts)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("dry") / "here"
    (folder / "texts").mkdir(parents=True)
    for n in range(4):
        (folder / "texts" / f"{n}.txt").write_text("some words to be read " * 20 + str(n))
    prepare(Options([folder / "texts"], folder / "words"))
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "experts.yaml").write_text(EXPERTS)
    (folder / "dry.yaml").write_text("include: run.yaml\nmore:\n  dry_run: true\n")
    before = sorted(folder.rglob("*"))
    run = [Case(c.flags, c.environment, c.config, dry=False) for c in REFUSED.values()]
    every = [*CASES.values(), *REFUSED.values(), *run]
    names = [*CASES, *REFUSED, *(f"run of {name}" for name in REFUSED)]
    script = folder.parent / "cases.json"
    script.write_text(json.dumps([asdict(case) for case in every]))
    environment = {n: v for n, v in os.environ.items() if n not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, str(script)],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [Outcome(**o) for o in json.loads((folder.parent / "outcomes.json").read_text())]
    assert sorted(folder.rglob("*")) == before, "a dry run wrote something"
    return dict(zip(names, found, strict=True))


def stages(outcome: Outcome) -> list[int]:
    return [stage["of_a_rank"] for stage in outcome.facts["parameters"]["stages"]]


def test_shapes_and_parameters_by_hand(outcomes: dict[str, Outcome]) -> None:
    """A layer: (32 + 2 x 16) x 32 of queries, keys and values, 32 x 32 of the output of attention,
    2 x 48 x 32 and 48 x 32 of the MLP, and two norms of 32."""
    assert outcomes["one rank"].code is None
    layer = 2048 + 1024 + 3072 + 1536 + 2 * 32
    found = outcomes["one rank"].facts["parameters"]
    assert found["total"] == found["planned"] == 4 * layer + 32 + 258 * 32 == 39264
    assert stages(outcomes["one rank"]) == [39264]
    (stage,) = found["stages"]
    shapes = {s["name"]: (s["shape"], s["times"]) for s in stage["shapes"]}
    assert shapes == {
        "embedding.word_embeddings.weight": ([258, 32], 1),
        "decoder.layers.0-3.input_layernorm.weight": ([32], 4),
        "decoder.layers.0-3.self_attention.linear_proj.weight": ([32, 32], 4),
        "decoder.layers.0-3.self_attention.linear_qkv.weight": ([64, 32], 4),
        "decoder.layers.0-3.pre_mlp_layernorm.weight": ([32], 4),
        "decoder.layers.0-3.mlp.linear_fc1.weight": ([96, 32], 4),
        "decoder.layers.0-3.mlp.linear_fc2.weight": ([32, 48], 4),
        "decoder.final_layernorm.weight": ([32], 1),
    }


def test_stages_and_tensor_parallel_ranks(outcomes: dict[str, Outcome]) -> None:
    """The vocabulary is padded to 260; the last stage has a copy of the tied table, not counted."""
    got = outcomes["tp 2 pp 2"].facts
    assert got["ranks"] == 4
    assert got["ranks_from"].startswith("the fewest")
    assert got["parameters"]["total"] == got["parameters"]["planned"] == 4 * 7744 + 32 + 260 * 32
    two_layers = 2 * (2048 + 1024 + 3072 + 1536) // 2 + 2 * 64
    assert stages(outcomes["tp 2 pp 2"]) == [two_layers + 130 * 32, two_layers + 32 + 130 * 32]
    assert "decoder.layers.0.mlp.linear_fc1.weight" in outcomes["tp 2 pp 2"].out


def test_other_models(outcomes: dict[str, Outcome]) -> None:
    attention, experts = 2048 + 1024 + 64, 4 * (2 * 24 * 32 + 24 * 32) + 4 * 32
    sparse = outcomes["experts"].facts["parameters"]
    assert sparse["total"] == sparse["planned"] == 4 * (attention + experts) + 32 + 258 * 32
    assert stages(outcomes["experts"]) == [sparse["total"] - 4 * 2 * 2304]
    assert "local_experts.0-1.linear_fc1.weight" in outcomes["experts"].out
    more = 258 * 32 + 4 * 64 + (3 * 16 + 1) * 32  # a table of its own, biases, the module
    other = outcomes["self-conditioning, untied, biases"].facts["parameters"]
    assert other["total"] == other["planned"] == 39264 + more


def test_rows_bytes_and_memory(outcomes: dict[str, Outcome]) -> None:
    """8 blocks of 8, the clean rows of the last of which nobody sees; float32."""
    facts = outcomes["csbp"].facts
    rows = facts["rows"]
    assert [sum(rank[half] for rank in rows) for half in ("clean", "corrupted")] == [56, 64]
    pairs = sum(8 * 8 * (block + 1) for block in range(7)) + sum(
        8 * 8 * block + 8 * 8 for block in range(8)
    )
    assert sum(rank["pairs"] for rank in rows) == pairs
    sent = {flow["what"]: flow["bytes"] for flow in facts["traffic"]["flows"]}
    most = facts["derived"]["exchanged_bytes_per_rank_and_sequence"]
    clean = rows[facts["traffic"]["slot_rank"]]["clean"]
    assert sent["K/V"] == 4 * most  # 4 micro-batches
    assert most >= 4 * clean * 2 * 16 * 4 * 2  # layers, rows, K|V, bytes, two passes to one rank
    memory = facts["memory"]
    assert memory["total"] == sum(memory["parts"].values())
    assert memory["parts"]["weights"] == 39264 * 4
    assert "Rows of each slot rank" in outcomes["csbp"].out


def test_how_many_ranks(outcomes: dict[str, Outcome]) -> None:
    eight = outcomes["hybrid"].facts
    assert (eight["ranks"], eight["ranks_from"]) == (8, "WORLD_SIZE")
    degrees = {"tp": 1, "sequence_parallel": False, "pp": 1, "ep": 1, "dp": 2}
    assert eight["degrees"] == degrees | {"slot": 4, "bp": 4, "cp": 2}
    two = outcomes["two ranks asked for"].facts
    assert (two["ranks"], two["ranks_from"]) == (2, "--dry-run-world-size")
    assert (outcomes["another rank"].code, outcomes["another rank"].out) == (None, "")
    assert outcomes["with equals signs"].facts["ranks"] == 1  # and no TensorBoard file
    assert outcomes["no ranks"].code == 2
    assert "--dry-run-world-size 0: must be at least 1" in outcomes["no ranks"].error


def test_what_is_not_here_is_said(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["real data"].facts["notes"] == []
    assert "Not looked at" not in outcomes["real data"].out
    (data,) = outcomes["csbp"].facts["notes"]
    assert data.startswith("nowhere/words.bin: no such file")
    assert data in outcomes["csbp"].out
    notes = "\n".join(outcomes["for gpus"].facts["notes"])
    for words in ("transformer_engine: ", "nowhere/words", "not found at none", "flash_fa3"):
        assert words in notes
    assert outcomes["for gpus"].facts["parameters"]["dtype"] == "bfloat16"
    fused = [outcomes[name].facts["memory"]["fused"] for name in ("csbp", "for gpus")]
    assert fused == [False, True]


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_run_refuses_is_refused_with_its_words(
    outcomes: dict[str, Outcome], name: str
) -> None:
    dry, run = outcomes[name], outcomes[f"run of {name}"]
    assert (dry.code, run.code) == (2, 2)
    assert dry.error == run.error != ""
    assert dry.out == ""


@pytest.mark.parametrize("name", ["in a file", "alone", "alone, with an equals sign"])
def test_a_run_is_not_dry_by_its_file(outcomes: dict[str, Outcome], name: str) -> None:
    assert outcomes[name].code == 2
    assert "go with --dry-run" in outcomes[name].error


def test_a_count_that_differs_is_said(outcomes: dict[str, Outcome]) -> None:
    from megatron_bp.tools.dry_run.text import lines

    facts = outcomes["csbp"].facts
    assert "planner counts" not in outcomes["csbp"].out
    wrong = facts | {"parameters": facts["parameters"] | {"planned": 39000}}
    assert any("counts 39,000, which is wrong by -264" in line for line in lines(wrong))


def test_numbers_are_folded() -> None:
    from megatron_bp.tools.dry_run.facts import fold, ranges
    from megatron_bp.tools.dry_run.meta import Parameter

    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    names = [f"a.layers.{n}.mlp.local_experts.{e}.w" for n in (1, 2, 4) for e in (0, 1)]
    found = fold([*(Parameter(name, (2, 3), 1) for name in names), Parameter("b", (3,), 1)])
    assert found == [
        {"name": "a.layers.1-2,4.mlp.local_experts.0-1.w", "shape": [2, 3], "times": 6},
        {"name": "b", "shape": [3], "times": 1},
    ]


if __name__ == "__main__":
    from megatron_bp import cpu

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    cpu.install()
    cases = [Case(**case) for case in json.loads(Path(sys.argv[1]).read_text())]
    done = [asdict(act(case, number)) for number, case in enumerate(cases)]
    Path(sys.argv[1]).with_name("outcomes.json").write_text(json.dumps(done))
