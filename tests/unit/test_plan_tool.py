"""The planner's command: what it prints and writes, what it refuses, what it advises."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

from megatron_bp.planning import rates as fitted
from megatron_bp.planning.hardware import GIB, Gpu, gpu_named
from megatron_bp.planning.search import Machine, Search
from megatron_bp.planning.shape_file import read_task
from megatron_bp.tools.plan import change
from megatron_bp.tools.plan.bench_rates import read_bench
from megatron_bp.tools.plan.command import lengths, main
from megatron_bp.tools.plan.text import table

ROOT = Path(__file__).parents[2]
SHAPE = """
model: {name: a small one, hidden: 256, vocabulary: 1024, tied: true}
layers:
  groups:
    - times: 4
      attention: {query_heads: 8, key_heads: 4, head_dim: 32}
      mlp: {width: 512}
task:
  length: 2048
  global_batch: 4
  sequence: {block_size: 32}
"""


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    path = tmp_path / "shape.yaml"
    path.write_text(SHAPE)
    return path


def planned(capsys: pytest.CaptureFixture[str], *argv: Any) -> tuple[int, str, str]:
    """(exit status, printed, errors) of a command line."""
    with pytest.raises(SystemExit) as stopped:
        main([str(one) for one in argv])
    told = capsys.readouterr()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code, told.out, told.err


def test_what_it_tells(shape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    status, out, _ = planned(capsys, shape, "--gpus", 4, "--context", "1K,2048", "--json", file)
    assert status == 0
    # 4 layers: 256 x 32 x (16 + 8) in attention, 3 x 256 x 512 after it, 2 norms; table, last norm.
    count = 4 * (256 * 32 * 24 + 3 * 256 * 512 + 2 * 256) + 1024 * 256 + 256
    assert f"a small one: {count / 1e9:.2f} billion parameters, blocks of 32, 4 packed rows" in out
    assert "4 x h200 (139.8 GiB, of which 10% are to stay free, 989.0 TFLOP/s), 1 node of 4" in out
    assert re.findall(r"^## ([\d,]+) tokens a row$", out, re.MULTILINE) == ["1,024", "2,048"]
    written = json.loads(file.read_text())
    assert [one["length"] for one in written["contexts"]] == [1024, 2048]
    for one in written["contexts"]:
        first = one["fitting"][0]
        assert f"The first, {first['layout']}:" in out
        assert f"{first['tokens_per_second']:,.0f}" in out
        parts = first["seconds"]
        total = sum(parts[n] for n in ("products", "attention", "head", "optimizer", "bubble"))
        assert parts["total"] == pytest.approx(total + sum(parts["exposed"].values()))
        assert first["memory"]["total"] == sum(
            value for name, value in first["memory"].items() if name != "total"
        )
        sent = {flow["name"]: flow["bytes"] for flow in first["traffic"]}
        assert all(name in out for name in sent)
    assert re.search(r"planned in \d+\.\d s$", out.strip())


def test_fewer_layouts_are_printed(shape: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        len(re.findall(r"^\| +(?:1=|\d+) \| +[\d,]+ \| +[\d,.]+ \|", text, re.MULTILINE))
        for _, text, _ in (planned(capsys, shape, "--gpus", 4, "--top", n) for n in (1, 3))
    ]
    assert rows == [1, 3]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--gpus", "0"], "--gpus 0: must be at least 1"),
        (["--gpus", "many"], "invalid int value: 'many'"),
        (["--gpus", "16", "--nodes", "3"], "--gpus 16 on --nodes 3: nodes hold equally many"),
        (["--gpus", "16", "--nodes", "5"], "give a multiple of 5"),
        (["--nodes", "0"], "--nodes 0: must be at least 1"),
        (["--gpu", "h300"], "--gpu h300: not in hardware.yaml"),
        (["--context", "0"], "--context 0: '0' is no length"),
        (["--context", "64Q"], "'64Q' is no length; write tokens, such as 65536 or 64K"),
        (["--context", "64K,"], "'' is no length"),
        (["--context", "8000000M"], "cannot be counted in the memory of this machine"),
        (["--top", "0"], "--top 0: must be at least 1"),
        (["--gpus", "1000"], "--gpus 1000: at most 512 are planned at once"),
        (["--json", "none/at/all.json"], "--json none/at/all.json: there is no such folder"),
        (["--free", "100"], "--free 100.0: per cent of a GPU's memory, from 0 to below 100"),
        (["--network", "-1"], "--network -1.0: must be above 0"),
        (["--global-batch", "0"], "--global-batch 0: must be at least 1"),
        (["--rates", "none.json"], "--rates none.json: cannot be read as JSON"),
        (["--rates", "SHAPE"], "SHAPE: cannot be read as JSON"),
        (["--", "--lr", "1"], "--lr 1: flags override the config of a run"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
)
def test_nonsense_gets_one_line(
    shape: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    given = [str(shape) if one == "SHAPE" else one for one in more]
    status, _, errors = planned(capsys, shape, *given)
    assert status == 2
    assert errors.startswith("plan: error: ")
    assert errors.count("\n") == 1
    assert words.replace("SHAPE", str(shape)) in errors


@pytest.mark.parametrize("text", [None, "layers: {groups: []}\n"])
def test_a_bad_file_gets_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    path = tmp_path / "shape.yaml"
    if text is not None:
        path.write_text(text)
    status, _, errors = planned(capsys, path)
    assert (status, errors.count("\n")) == (2, 1)
    assert str(path) in errors


@pytest.mark.parametrize(
    ("text", "want"),
    [(None, []), ("64K", [65536]), ("1k, 2M,7", [1024, 2 << 20, 7])],
)
def test_lengths(text: str | None, want: list[int]) -> None:
    assert lengths(text) == want


# --- nothing fits --------------------------------------------------------------------------------


def test_a_million_tokens_on_one_small_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Nemotron 14B: its weights, gradients and optimizer alone are 18 B x 13.5 billion."""
    file = ROOT / "configs" / "shapes" / "nemotron_14b.yaml"
    short = ("--gpu", "rtx4090", "--gpus", 1, "--context", "8K")
    status, out, _ = planned(capsys, file, *short)
    assert status == 1
    (lacks, needs), has = (
        re.findall(r"memory is short by ([\d,.]+) GiB .* It needs ([\d,.]+) GiB", out)[0],
        0.9 * 23.6,
    )
    lacks, needs = (float(text.replace(",", "")) for text in (lacks, needs))
    assert lacks == pytest.approx(needs - has, abs=0.11)
    assert needs > 18 * 13.5e9 / GIB
    assert "rtx4090 has 21.2 if 10% of its 23.6 stay free" in out
    assert "more GPUs, " in out
    assert "a shorter row does not help down to 1,024 tokens" in out


def small_machine(has: float, gpus: int = 1) -> Machine:
    rates, uncounted = fitted.read()
    gpu = replace(gpu_named("rtx4090"), memory=has)
    return Machine(gpu, gpus, gpus, rates, replace(uncounted, process=1))


def test_what_is_advised_fits_and_less_does_not(shape: Path) -> None:
    """Memory for 5/8 of the row on one GPU: a half fits, and two GPUs do."""
    task = replace(read_task(shape), length=32768)
    lean = change.leanest(replace(task, length=20480), small_machine(1e12), {})
    assert lean is not None
    tight = Search(replace(task, length=20480), small_machine(1e12)).judge(lean.layout)
    where = small_machine(tight.memory.total)
    assert Search(task, where).run().fitting == ()
    told = [*change.changes(task, where)]
    assert any(one.startswith("a shorter row, 16,384 tokens: ") for one in told), told
    assert any(one.startswith("a GPU with more memory, ") for one in told), told
    (more,) = (
        re.match(r"more GPUs, (\d+) of rtx4090: ", one) for one in told if "more GPUs" in one
    )
    assert more is not None
    number = int(more[1])

    def fits(gpus: int, length: int = 32768) -> bool:
        machine = replace(where, gpus=gpus, per_node=min(gpus, 8))
        return bool(Search(replace(task, length=length), machine).run().fitting)

    assert fits(number)
    assert not fits(number // 2)
    assert fits(1, 16384)
    assert not fits(1, 32768)


def test_the_optimizer_is_advised_to_be_shared(shape: Path) -> None:
    task = replace(read_task(shape), distributed_optimizer=False, length=256)
    shared = replace(task, distributed_optimizer=True)
    machine = small_machine(1e12, gpus=4)
    lean = change.leanest(shared, machine, {})
    assert lean is not None
    least = min(one.memory.total for one in Search(shared, machine).run().fitting)
    told = [*change.changes(task, small_machine(max(least, lean.memory.total), gpus=4))]
    assert told[0].startswith("share the optimizer (use_distributed_optimizer: true): ")


# --- rates of a machine --------------------------------------------------------------------------

SLOW = Gpu("cpu", 1e9, 1e10, 1e10, 1e10, 1e9, 1e9, 1)
RATES = fitted.Rates(0.1, 0.2, 0.3, 0.4)
#: A step of 3 layers: 6 x 1,000 weights x 50 rows, and 14 x 2 heads x 8 x 3 of 500 pairs.
STEP = {
    "layers": 3,
    "heads": 2,
    "head_dim": 8,
    "sizes": [
        {
            "length": 64,
            "weights": 1000,
            "ways": {"block diffusion": {"seconds": [2e-4, 9, 1e-4], "rows": 50, "pairs": 500}},
        }
    ],
}
ATTENTION = {
    "heads": [2, 1, 8],
    "dtype": "float32",
    "sizes": [
        {"length": 1, "passes": {}},
        {
            "length": 64,
            "passes": {
                "forward and backward": {
                    "causal": {"seconds": [1e-9], "pairs": [500]},
                    "sdpa": {"seconds": [1.4e-5, 2.8e-5, 9], "pairs": [500]},
                    "tiled": {"seconds": [1.0], "pairs": [500]},
                }
            },
        },
    ],
}


@pytest.mark.parametrize("first", [0, 1])
def test_rates_of_a_bench(tmp_path: Path, first: int) -> None:
    """Attention: 14 x 2 x 8 x 500 FLOPs in 28 us are 4e9 a second; a step: all of it in 200 us."""
    files = []
    for name, content in (("step", STEP), ("attention", ATTENTION)):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(content))
    step = (6 * 1000 * 50 + 14 * 16 * 3 * 500) / 2e-4 / 1e10
    found, told = read_bench([files[first], files[1 - first]], SLOW, RATES)
    assert found == replace(RATES, products=pytest.approx(step), attention=pytest.approx(0.4))
    assert "attention 40% of the peak (attention.json)" in told
    assert f"a whole step {step:.0%} of the peak (step.json)" in told
    alone, _ = read_bench(files[1:], SLOW, RATES)
    assert (alone.products, alone.attention) == (0.1, pytest.approx(0.4))
    both, _ = read_bench(files[:1], SLOW, RATES)
    assert both.products == both.attention == pytest.approx(step)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"sizes": 1}, "no complete measurement"),
        ({"sizes": [{}]}, "no complete measurement"),
        ({"sizes": [{"length": 1, "ways": {"block diffusion": {}}}]}, "no complete measurement"),
        (ATTENTION | {"heads": []}, "no complete measurement"),
        (STEP | {"layers": 0, "sizes": [STEP["sizes"][0] | {"weights": 0}]}, "gives 0% of the"),
    ],
)
def test_half_a_bench_is_refused(tmp_path: Path, content: dict[str, Any], words: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"--rates {path}: .*{words}"):
        read_bench([path], SLOW, RATES)


def test_rates_of_the_machine_that_was_measured_here() -> None:
    folder = ROOT / "docs" / "benchmarks"
    files = [folder / "attention.json", folder / "step.json"]
    found, _ = read_bench(files, gpu_named("cpu"), RATES)
    assert 0 < found.products < 1
    assert 0 < found.attention < 1


# --- configs of runs -----------------------------------------------------------------------------


def plan_of_run(rank: int, world: int, argv: list[str]) -> tuple[int, str]:
    """(exit status, what is printed) where Megatron can be imported."""
    import contextlib
    import io

    told, status = io.StringIO(), 0
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        try:
            main(argv)
        except SystemExit as stopped:
            status = int(stopped.code or 0)
    return status, told.getvalue()


@pytest.mark.ranks
def test_a_config_of_a_run_and_its_own_layout() -> None:
    argv = [str(ROOT / "configs" / "quickstart.yaml"), "--gpus", "4", "--gpu", "cpu"]
    status, out = run_ranks(1, plan_of_run, [*argv, "--", "--global-batch-size", "8"])[0]
    assert status == 0, out
    assert "3 layers of 128: 0.00 billion parameters, blocks of 4, 8 packed rows a step" in out
    assert "The config's own layout, DP 2, CSBP 2, no recompute" in out


@pytest.mark.ranks
def test_the_own_layout_has_the_batch_that_was_asked_for() -> None:
    """The config's batch of 2 could not be dealt to 3 replicas."""
    argv = [str(ROOT / "configs" / "quickstart.yaml"), "--gpus", "6", "--gpu", "cpu"]
    status, out = run_ranks(1, plan_of_run, [*argv, "--global-batch", "3", "--context", "64"])[0]
    assert status == 0, out
    assert "3 packed rows a step" in out
    assert "The config's own layout, DP 3, CSBP 2, no recompute" in out


@pytest.mark.ranks
def test_a_layout_that_the_gpus_cannot_take_is_noted() -> None:
    argv = [str(ROOT / "configs" / "quickstart.yaml"), "--gpus", "3", "--gpu", "cpu"]
    status, out = run_ranks(1, plan_of_run, argv)[0]
    assert status == 0, out
    assert "note: the config's own layout is left out: 3 GPUs, and the degrees" in out


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--multi-latent-attention", "--multi-latent-attention: exchanging latent K/V"),
        ("--num-layer", "unrecognized arguments: --num-layer"),
    ],
)
def test_what_training_refuses_is_refused(flag: str, words: str) -> None:
    argv = [str(ROOT / "configs" / "quickstart.yaml"), "--gpu", "cpu", "--", flag]
    status, out = run_ranks(1, plan_of_run, argv)[0]
    assert status == 2
    assert words in out


# --- the rest ------------------------------------------------------------------------------------


def test_a_shape_is_planned_without_megatron() -> None:
    names = ("search", "shape_file", "memory", "seconds", "traffic")
    code = "".join(f"import megatron_bp.planning.{name}\n" for name in names)
    code += "import megatron_bp.tools.plan.text, megatron_bp.tools.plan.change, sys\n"
    code += "print(sorted(m for m in sys.modules if m.split('.')[0] in ('megatron', 'matplotlib')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr


def test_tables_are_aligned() -> None:
    assert [*table(["a", "name"], [["1,000", "x"], ["2", "yy"]])] == [
        "|     a | name |",
        "|------:|------|",
        "| 1,000 | x    |",
        "|     2 | yy   |",
    ]
