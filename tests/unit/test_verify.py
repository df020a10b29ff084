"""tools.verify without ranks: topologies, configs of layouts, shrinking, comparison, launching."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_bp.tools.verify import compare, launch
from megatron_bp.tools.verify.command import main, parse
from megatron_bp.tools.verify.compare import Run, compare_gradients, compare_steps
from megatron_bp.tools.verify.configuration import of_a_few_steps, of_layout
from megatron_bp.tools.verify.gradients import disagreement
from megatron_bp.tools.verify.launch import LaunchError, by_template
from megatron_bp.tools.verify.report import Verdict, replica_failures, table, told, write_json
from megatron_bp.tools.verify.sample_data import has_data, with_sample_data
from megatron_bp.tools.verify.shrink import shrink
from megatron_bp.tools.verify.topology import Topology, TopologyError, parse_topology

# --- topologies ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted", "world"),
    [
        ("dp=1", Topology(), 1),
        ("tp=2,bp=2,pp=2", Topology(tp=2, bp=2, pp=2), 8),
        ("bp=4,cp=1", Topology(bp=4, cp=1), 4),
        ("cp=4", Topology(cp=4), 4),
        (" tp = 2 , sp ", Topology(tp=2, sp=True), 2),
        ("dp=2,bp=2,dist_opt=1", Topology(dp=2, bp=2, dist_opt=True), 4),
        ("ep=4,bp=4", Topology(ep=4, bp=4), 4),
        ("bp=2,bf16=0,recompute=full", Topology(bp=2, bf16=False, recompute="full"), 2),
        ("pp=2,vpp=2,accum=3", Topology(pp=2, vpp=2, accum=3), 2),
    ],
)
def test_a_topology_is_read(text: str, wanted: Topology, world: int) -> None:
    assert parse_topology(text) == wanted
    assert wanted.world == world
    assert parse_topology(wanted.name) == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pb=2", "did you mean bp"),
        ("distopt", "did you mean dist_opt"),
        ("", "unknown name"),
        ("bp=2,", "unknown name"),
        ("bp=0", "from 1 on"),
        ("bp=-2", "from 1 on"),
        ("bp", "from 1 on"),
        ("bp=two", "from 1 on"),
        ("bp=2,bp=4", "given twice"),
        ("sp", "give tp=2"),
        ("vpp=2", "give pp=2"),
        ("tp=2,sp=yes", "is on"),
        ("recompute=some", "full, selective, none"),
        ("recompute", "full, selective, none"),
    ],
)
def test_a_bad_topology_is_refused(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        parse_topology(text)


# --- the config of a layout ----------------------------------------------------------------------

VALUES: dict[str, Any] = {
    "global_batch_size": 4,
    "train_iters": 500,
    "lr_warmup_iters": 20,
    "save": "runs/x",
    "block_parallel_size": 8,
    "sequence_parallel": True,
    "overlap_param_gather": True,
    "bf16": True,
    "recompute_granularity": "selective",
    "hidden_size": 128,
}


def test_a_layout_states_all_degrees() -> None:
    got = of_layout(VALUES, parse_topology("tp=2,bp=2"))
    assert got["tensor_model_parallel_size"] == 2
    assert got["block_parallel_size"] == 2
    assert "context_parallel_size" not in got
    assert "sequence_parallel" not in got
    assert "overlap_param_gather" not in got
    assert got["bf16"]
    assert got["recompute_granularity"] == "selective"
    got = of_layout(VALUES, parse_topology("tp=2,sp,dist_opt,bf16=0,recompute=full,bp=4,cp=2"))
    assert got["sequence_parallel"]
    assert got["use_distributed_optimizer"]
    assert got["overlap_param_gather"]
    assert "bf16" not in got
    assert (got["recompute_granularity"], got["recompute_num_layers"]) == ("full", 1)
    assert got["context_parallel_size"] == 2
    assert "recompute_granularity" not in of_layout(VALUES, parse_topology("recompute=none"))


@pytest.mark.parametrize("text", ["dp=3", "accum=8", "dp=4,accum=2", "pp=3,vpp=2"])
def test_a_batch_that_cannot_be_cut_is_refused(text: str) -> None:
    with pytest.raises(TopologyError, match="the same 4 samples a step"):
        of_layout(VALUES, parse_topology(text))


def test_a_few_steps_keep_the_learning_rates_and_leave_the_run_out() -> None:
    got = of_a_few_steps(VALUES, 3)
    assert (got["train_iters"], got["lr_decay_iters"], got["eval_iters"]) == (3, 500, 0)
    assert "save" not in got
    assert "lr_warmup_iters" not in got
    by_samples = {"train_samples": 4000, "global_batch_size": 4, "lr_decay_samples": 100}
    got = of_a_few_steps(by_samples, 2)
    assert (got["train_iters"], got["lr_decay_iters"]) == (2, 1000)
    assert "train_samples" not in got


# --- shrinking -----------------------------------------------------------------------------------

LARGE: dict[str, Any] = {
    "num_layers": 48,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "seq_length": 32768,
    "diffusion_block_size": 32,
    "global_batch_size": 512,
    "normalization": "RMSNorm",
    "untie_embeddings_and_output_weights": True,
    "window_size": "(4095,0)",
    "window_attn_skip_freq": "([1]*5+[0])*8",
    "vocab_size": 150000,
}


def small(more: dict[str, Any], *texts: str) -> dict[str, Any]:
    return shrink(LARGE | more, [parse_topology(t) for t in texts])[0]


def test_shrinking_keeps_the_structure() -> None:
    got, told = shrink(LARGE, [Topology(), parse_topology("bp=2")])
    for name in ("normalization", "untie_embeddings_and_output_weights", "vocab_size"):
        assert got[name] == LARGE[name]
    assert got["num_attention_heads"] == 2 * got["num_query_groups"]
    assert got["num_attention_heads"] * got["kv_channels"] == got["hidden_size"]
    assert got["window_size"] == "(16,0)"
    assert got["window_attn_skip_freq"] == "[1,1,1,0]"  # both kinds of layers are left
    assert got["global_batch_size"] == 2
    assert "hidden_size 4096 -> 64" in told


@pytest.mark.parametrize(
    ("texts", "batch", "layers", "groups"),
    [
        (["bp=2"], 2, 4, 2),
        (["dp=3", "dp=2"], 6, 4, 2),
        (["bp=2,accum=2", "dp=2"], 2, 4, 2),
        (["dp=2,accum=2"], 4, 4, 2),
        (["tp=4", "tp=2"], 2, 4, 4),
        (["pp=4,vpp=2"], 4, 8, 2),
        (["pp=3"], 2, 6, 2),
    ],
)
def test_all_layouts_can_cut_what_is_left(
    texts: list[str], batch: int, layers: int, groups: int
) -> None:
    got = small({}, *texts)
    found = (got["global_batch_size"], got["num_layers"], got["num_query_groups"])
    assert found == (batch, layers, groups)
    for text in texts:
        of_layout(got, parse_topology(text))


def test_other_attention_and_experts_shrink() -> None:
    got = small({"num_query_groups": 1}, "tp=2")
    assert (got["num_query_groups"], got["num_attention_heads"]) == (1, 2)
    plain = {k: v for k, v in LARGE.items() if "query" not in k}
    assert shrink(plain, [Topology()])[0]["num_attention_heads"] == 4
    experts = {"num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768}
    got = small(experts, "ep=2,bp=2")
    assert (got["num_experts"], got["moe_router_topk"], got["moe_ffn_hidden_size"]) == (4, 2, 32)
    assert small(experts, "ep=8,dp=8")["num_experts"] == 8
    assert small({"moe_layer_freq": "[0]+[1]*47"}, "pp=2")["moe_layer_freq"] == "[0,1,1,1]"


def test_data_that_is_not_there_is_made(tmp_path: Path) -> None:
    prefix = tmp_path / "text"
    assert not has_data({})
    assert not has_data({"data_path": [str(prefix)]})
    values = {"data_path": [str(prefix)], "tokenizer_type": "NullTokenizer", "vocab_size": 300}
    made = with_sample_data(values, tmp_path)
    assert has_data(made)
    assert made["vocab_size"] == 300
    with pytest.raises(ValueError, match="cannot hold text as bytes"):
        with_sample_data(values | {"vocab_size": 50}, tmp_path)
    (tmp_path / "text.idx").touch()
    assert has_data(values | {"data_path": ["0.3", str(prefix)]})


# --- comparison ----------------------------------------------------------------------------------

EMBEDDING = "embedding.word_embeddings.weight"
GENERATOR = torch.Generator().manual_seed(1)
GRADIENTS = {f"layer.{i}": torch.randn(4, 5, generator=GENERATOR) for i in range(30)}
GRADIENTS[EMBEDDING] = torch.zeros(16, 4)
GRADIENTS[EMBEDDING][:10] = torch.randn(10, 4, generator=GENERATOR)


def run_of(changed: dict[str, Tensor | None], padded: int = 16) -> Run:
    gradients = {n: g for n, g in (GRADIENTS | changed).items() if g is not None}
    return Run(gradients, [], vocabulary=10, padded=padded)


def report_of(changed: dict[str, Tensor | None], padded: int = 16) -> compare.GradientReport:
    return compare_gradients(run_of(changed, padded), run_of({}))


def test_the_error_is_relative_to_the_parameter() -> None:
    assert report_of({}).failures == ()
    assert report_of({}).worst[1] == 0
    off = GRADIENTS["layer.3"].double() * (1 + 9e-6)
    report = report_of({"layer.3": off})
    assert report.failures == ()
    assert report.worst == ("layer.3", pytest.approx(9e-6, rel=1e-3))
    report = report_of({"layer.3": GRADIENTS["layer.3"].double() * (1 + 1.1e-5)})
    assert [f.split()[0] for f in report.failures] == ["layer.3"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layer.7": None}, "layer.7 is missing"),
        ({"layer.99": torch.ones(2)}, "layer.99 is extra"),
        ({"layer.7": torch.ones(5, 4)}, r"layer.7 is \[5, 4\], not \[4, 5\]"),
        ({"layer.7": torch.full((4, 5), math.nan)}, "layer.7 nan"),
        ({"layer.7": torch.full((4, 5), math.inf)}, "layer.7 inf"),
        ({"layer.7": torch.zeros(4, 5)}, r"layer.7 1.0e\+00"),
        ({EMBEDDING: torch.ones(16, 4)}, "gradient in the padded rows"),
        ({EMBEDDING: GRADIENTS[EMBEDDING][:9]}, r"is \[9, 4\], not \[10, 4\]"),
    ],
)
def test_a_wrong_gradient_fails(changed: dict[str, Tensor | None], message: str) -> None:
    report = report_of(changed)
    assert any(re.search(message, f) for f in report.failures), report.failures


def test_nan_in_the_reference_fails() -> None:
    broken = run_of({"layer.7": torch.full((4, 5), math.nan)})
    assert compare_gradients(broken, broken).failures


def test_another_padding_is_no_difference() -> None:
    longer = torch.zeros(32, 4)
    longer[:10] = GRADIENTS[EMBEDDING][:10]
    assert report_of({EMBEDDING: longer}, padded=32).failures == ()
    longer[31, 0] = 1e-30
    assert "padded rows" in report_of({EMBEDDING: longer}, padded=32).failures[0]


def test_under_the_floor() -> None:
    tiny = {"layer.0": torch.full((4, 5), 1e-8)}
    want = run_of(tiny)
    noise = compare_gradients(run_of({"layer.0": torch.full((4, 5), -2e-8)}), want)
    assert noise.failures == ()
    assert [*noise.under_floor] == ["layer.0"]
    assert "layer.0" not in noise.errors
    large = compare_gradients(run_of({"layer.0": torch.full((4, 5), 1e-3)}), want)
    assert "under the floor" in large.failures[0]
    half = run_of({"layer.0": torch.full((4, 5), 5e-4)})
    assert [*compare_gradients(half, half).under_floor] == ["layer.0"]
    many = run_of({f"layer.{i}": torch.full((4, 5), 1e-8) for i in range(2)})
    assert "too many to certify" in compare_gradients(many, many).failures[-1]


def test_nothing_learned_cannot_be_certified() -> None:
    nothing = run_of({name: torch.zeros_like(g) for name, g in GRADIENTS.items()})
    assert compare_gradients(nothing, nothing).failures


ROWS = [
    {"kind": "train", "loss": 2.0, "diffusion_loss": 2.0, "diffusion_count": 7, "scored": 3,
     "masked_fraction": 0.5, "grad_norm": 1.5, "skipped": 0, "seconds": 1.0},
    {"kind": "train", "loss": 1.0, "diffusion_loss": 1.0, "diffusion_count": 7, "scored": 3,
     "masked_fraction": 0.25, "grad_norm": 1.25, "skipped": 0, "seconds": 1.0},
]  # fmt: skip


def test_steps_compare() -> None:
    slower = [row | {"seconds": 9.0} for row in ROWS]
    assert compare_steps(slower, ROWS).failures == ()
    near = [ROWS[0], ROWS[1] | {"loss": 1 + 5e-6}]
    assert compare_steps(near, ROWS).failures == ()
    assert compare_steps(near, ROWS).loss == (0.0, pytest.approx(5e-6))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", 1.00002),
        ("diffusion_loss", math.nan),
        ("grad_norm", 1.2501),
        ("grad_norm", None),
        ("diffusion_count", 8),
        ("scored", 4),
        ("masked_fraction", 0.2500001),
        ("skipped", 1),
    ],
)
def test_a_wrong_step_fails(name: str, value: Any) -> None:
    (failure,) = compare_steps([ROWS[0], ROWS[1] | {name: value}], ROWS).failures
    assert failure.startswith(f"step 2: {name} ")


def test_a_step_less_fails() -> None:
    assert compare_steps(ROWS[:1], ROWS).failures == ("1 steps, not 2",)


def test_sixteen_bits_have_the_references_budget() -> None:
    reference = compare.GradientReport({"a": 0.01, "b": 0.002, "c": 0.03}, {}, 0.0, ())
    budget = compare.bf16_gradient_tolerance(reference)
    assert (budget("a"), budget("b"), budget("c")) == (0.02, 0.02, 0.06)
    steps = compare.bf16_step_tolerance(compare.StepReport((0.0, 1e-4), (0.01, 0.02), ()))
    assert steps("loss") == 2 * 2.0**-9
    assert steps("grad_norm") == 0.04


def test_replicas_that_differ_are_named() -> None:
    place = ("a.weight", (0,))
    same = [{place: (2.0, 1.0)}, {place: (2.0, 1.0)}, {("b.weight", (0,)): (5.0, 0.0)}]
    assert disagreement(same) == (0.0, "")
    error, name = disagreement([*same, {place: (2.0, 1.1)}])
    assert (round(error, 3), name) == (0.05, "a.weight")
    for bad in (math.nan, 3.0):
        facts = {"gradient_replicas": disagreement([*same, {place: (bad, 1.0)}])}
        assert "a.weight: its gradient differs" in replica_failures(facts)[0]


# --- the verdict ---------------------------------------------------------------------------------


def test_the_report_tells_all(tmp_path: Path) -> None:
    gradients, steps = report_of({"layer.7": None}), compare_steps(ROWS, ROWS)
    facts = {"groups": {"tp": 1}, "rows": [[3, 4], [5, 6]], "micro_batches": 2}
    good = Verdict("reference", facts, ROWS)
    bad = Verdict("bp=2", facts, ROWS, gradients, steps, gradients.failures)
    lines = table([good, bad]).splitlines()
    assert lines[1].split()[:3] == ["reference", "2.000000", "1.500000"]
    assert lines[2].endswith("FAILED")
    assert "3+4 5+6" in told(bad)
    assert "layer.7 is missing" in told(bad)
    write_json(tmp_path / "a.json", [good, bad], {"config": "x"})
    content = json.loads((tmp_path / "a.json").read_text())
    assert [v["passed"] for v in content["layouts"]] == [True, False]
    assert content["layouts"][1]["errors"]["layer.3"] == 0
    assert "refused" in table([dataclasses.replace(bad, gradients=None, refused=True)])


# --- processes -----------------------------------------------------------------------------------

SCRIPT = """
import os, sys, time
rank = os.environ.get("RANK", "0")
print("here is rank", rank, flush=True)
what = sys.argv[2] if len(sys.argv) > 2 else ""
if what == "hang":
    time.sleep(600)
if rank == "1" and what.startswith("end"):
    sys.exit(int(what[3:]))
if what.startswith("end"):
    time.sleep(600)
"""


def launched(tmp_path: Path, what: str, timeout: float = 60) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    commands = [
        ([sys.executable, str(script), str(tmp_path), what], {"RANK": str(rank)})
        for rank in range(2)
    ]
    launch._run(tmp_path, commands, timeout)


def test_ranks_that_end_well(tmp_path: Path) -> None:
    launched(tmp_path, "")
    assert (tmp_path / "rank1.log").read_text() == "here is rank 1\n"


def test_a_hang_ends_with_the_logs(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(LaunchError, match=r"(?s)not over after 3 s.*here is rank 1"):
        launched(tmp_path, "hang", 3)
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(("code", "refused"), [(1, False), (2, True)])
def test_a_rank_that_fails_ends_the_others(tmp_path: Path, code: int, refused: bool) -> None:
    begin = time.monotonic()
    with pytest.raises(LaunchError, match=rf"rank 1 with {code}") as error:
        launched(tmp_path, f"end{code}")
    assert error.value.refused is refused
    assert time.monotonic() - begin < 30  # not the 60 s that rank 0 would have


def test_a_template_starts_the_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; open(sys.argv[1] + '/got', 'w').write(' '.join(sys.argv[2:]))")
    run = by_template(f"{sys.executable} {script} {{folder}} --ranks {{ranks}} {{worker}}")
    run(tmp_path, 4, 60)
    worker = "-m megatron_bp.tools.verify.worker"
    assert (tmp_path / "got").read_text() == f"--ranks 4 {worker} {tmp_path}"
    with pytest.raises(ValueError, match="nothing in it starts the ranks"):
        by_template("srun true")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = parse(["a.yaml", "--topology", "bp=2", "--", "--lr", "1"])
    assert (options.topology, options.more, options.steps) == (["bp=2"], ["--lr", "1"], 3)
    for wrong in (["--topology", "x=1"], ["--topology", "bp=2", "--topology", "bp=2"]):
        assert main(["a.yaml", *wrong]) == 2
    (tmp_path / "there").touch()
    assert main(["a.yaml", "--topology", "bp=2", "--folder", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    for wrong in (["--steps", "0"], ["--timeout", "0"], []):
        with pytest.raises(SystemExit):
            parse(["a.yaml", *(["--topology", "bp=2"] if wrong else []), *wrong])


def test_it_is_a_module_that_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_bp.tools.verify", "--help"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0
    assert "exit status" in done.stdout
