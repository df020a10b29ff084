"""The commands of README.md and docs/running.md, run as they stand but for names and size.

Every command line that a page shows is run here, is what `.ci/run` itself does, or stands in
NOT_RUN with the reason.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import entry
import pytest
import yaml
from ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/running.md", "docs/testing.md", "docs/verify.md")
PAGES += ("docs/conversion.md", "docs/sft.md", "docs/benchmarks/sft_answer_rows.md")
PAGES += tuple(f"docs/benchmarks/{name}.md" for name in ("attention", "step", "exchange"))
PAGES += ("docs/benchmarks/two_hosts.md",)
NOT_RUN = {
    "configs/quickstart.yaml --save": "README's own, which is run, is this with another config",
    "configs/conversion": "tests/e2e/test_conversion.py trains and converts as these do",
    "scripts/quickstart.sh": "takes minutes; its steps are those that run here",
    "scripts/quickstart_conversion.sh": "takes minutes; its steps are those that run here",
    "scripts/quickstart_sft.sh": "takes minutes; its steps are those that run here",
    "scripts/te_environment.sh": "takes minutes, and gigabytes",
    "pytest tests/te": "needs Transformer Engine, which te_environment.sh installs",
    "scripts/test.sh": "is what runs this",
    "scripts/gpu_checks.sh": "needs a GPU",
    "tools.function_pairs": "tests/unit/test_function_pairs.py runs it on a small tree",
    "tools.prepare --format chats": "tests/unit/test_prepare_docs.py runs it",
    "configs/my_chats.yaml": "tests/unit/test_prepare_docs.py runs it in one process",
    "tools.sft_summary": "tests/e2e/test_sft_quickstart.py runs it",
    "tools.bench sft": "takes minutes; tests/unit/test_bench.py runs it at a small size",
    "tools.bench attention": "takes minutes; tests/unit/test_bench_attention.py runs it small",
    "tools.bench step": "takes minutes; tests/unit/test_bench_step.py runs it small",
    "tools.bench exchange": "needs 4 ranks; tests/unit/test_bench_step.py runs it on 2",
    "scripts/bench_cpu.sh": "takes most of an hour",
    "scripts/bench_two_hosts.sh": "needs root; tests/unit/test_two_hosts.py has its parts",
    "sbatch": "needs SLURM; tests/e2e/test_slurm.py runs the scripts under a stand-in of it",
    "srun --nodes N": "needs SLURM",
    "RUN.yaml --preflight": "tests/ranks/test_preflight.py runs it, and tests/e2e/test_slurm.py",
    "--nproc-per-node 16": "needs 16 ranks; tests/e2e/test_topologies.py runs such layouts on 4",
    "--seq-length 32768": "takes minutes",
    "configs/sft_quickstart.yaml --tiny": "tests/ranks/test_model.py has the presets",
    "configs/quickstart_moe.yaml --tiny": "tests/e2e/test_verify.py has experts",
    "[CONFIG.yaml]": "a usage line",
    "--dry-run-world-size 16": "tests/unit/test_dry_run.py runs it",
    "tools.plan CONFIG": "tests/unit/test_plan_tool.py runs it on small shapes and configs",
    "tools.draw KIND": "a usage line; tests/unit/test_draw.py runs each kind",
    "pkill": "tests/e2e/test_signals.py sends the signals",
    "TREE ...": "a usage line; README has the command",
    "RUN.yaml --topology": "needs several nodes; tests/unit/test_verify.py runs a --launch command",
    "--nproc-per-node N": "a usage line; N stands for any number",
}
SMALL = "--train-iters 3 --lr-warmup-iters 1 --eval-interval 3 --eval-iters 1 --seq-length 96"


def commands(page: str) -> list[str]:
    """Command lines of a page: indented blocks, and code in text that starts with a program."""
    text = (ROOT / page).read_text().replace("\\\n", " ")
    lines = re.findall(r"^ {4,}(.*)$", text, re.MULTILINE) + re.findall(r"`([^`]+)`", text)
    programs = r"(?:bash |\.venv(?:-te)?/bin/|python |torchrun |srun |sbatch |pkill )"
    program = re.compile(rf"^(?:\w+=\S+ )*{programs}")
    return [" ".join(line.split("#")[0].split()) for line in lines if program.match(line)]


def find(page: str, words: str) -> str:
    """The one command of the page that holds the words and is to be run."""
    found = [c for c in commands(page) if words in c and not any(n in c for n in NOT_RUN)]
    assert len(found) == 1, f"{page}: {found}"
    return found[0]


def parts(command: str, names: Sequence[tuple[str, str]]) -> tuple[list[str], dict[str, str]]:
    """Words of the command, with other names in it, and its variables."""
    for old, new in names:
        assert old in command, f"{old} is not in {command}"
        command = command.replace(old, new)
    words = shlex.split(command)
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    while "=" in words[0]:
        name, value = words.pop(0).split("=", 1)
        environment[name] = value
    return words, environment


def run(command: str, *names: tuple[str, str]) -> str:
    """What it writes; in processes that have imported Megatron already."""
    (program, *words), environment = parts(command, names)
    ranks = 1
    if program.endswith("torchrun"):
        options = [words.pop(0) for _ in range(words.index("pretrain_bdlm.py"))]
        assert options[:2] == ["--standalone", "--nproc-per-node"], command
        ranks = int(options[2])
    else:
        assert program.endswith("python"), command
    return "".join(run_ranks(ranks, entry.command, words, environment, fresh=True))


def run_alone(command: str, *names: tuple[str, str]) -> str:
    """What it writes, as a process."""
    (_, *words), environment = parts(command, names)
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prefix of data that README's command has made."""
    folder = tmp_path_factory.mktemp("data")
    tree = folder / "tree"
    tree.mkdir()
    for i in range(40):
        (tree / f"{i}.txt").write_text(f"number {i} follows number {i - 1}\n" * 8)
    prefix = str(folder / "mine")
    run(find("README.md", "tools.prepare"), ("TREE", str(tree)), ("data/mine", prefix))
    return prefix


def test_own_data_from_readme_then_summary_and_evaluation(data: str, tmp_path: Path) -> None:
    saved = str(tmp_path / "run")
    example = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example is not None
    text = re.sub("^   ", "", example[1], flags=re.MULTILINE)
    assert "include: quickstart.yaml" in text
    assert "[data/mine]" in text
    text = text.replace("quickstart.yaml", str(ROOT / "configs" / "quickstart.yaml"))
    config = tmp_path / "mine.yaml"
    config.write_text(text.replace("data/mine", data))

    names = [("configs/mine.yaml", str(config)), ("runs/mine", saved)]
    train = find("README.md", "configs/mine.yaml").replace("--nproc", "--standalone --nproc")
    assert (
        "rows_per_rank" in yaml.safe_load(run(f"{train} {SMALL} --print-config", *names))["derived"]
    )
    told = run(f"{train} {SMALL}", *names)
    assert "validation at iteration 3 | loss" in told
    assert (tmp_path / "run" / "metrics.jsonl").is_file()

    pages = [("RUN", saved), ("PREFIX", data)]
    summary = find("docs/running.md", "tools.summary").replace("[--at-most X]", "--at-most 9")
    assert "last bound / unigram entropy" in run(summary, *pages)
    report = find("docs/running.md", "tools.report RUN")
    assert "report.md" in run(report, ("RUN", saved))
    evaluation = find("docs/running.md", "tools.evaluate RUN --data")
    assert re.search(r"bound \d.* bits/byte \| 2 samples x 2 draws", run(evaluation, *pages))


def test_verify_from_its_page(tmp_path: Path) -> None:
    """Own processes, exit status, table, JSON."""
    command = find("docs/verify.md", "--topology bp=2 --topology dp=2,bp=2")
    file = tmp_path / "told.json"
    told = run_alone(f"{command} --steps 1 --json {file}", (" --topology dp=2,bp=2", ""))
    assert [told.split("\n")[-2].split()[i] for i in (0, -1)] == ["bp=2", "ok"]
    layouts = json.loads(file.read_text())["layouts"]
    assert [layout["layout"] for layout in layouts] == ["reference", "bp=2"]
    assert layouts[1]["worst_error"] < 1e-5


def test_every_command_shown_is_run_or_has_its_reason() -> None:
    ran = ("tools.prepare --input TREE --suffix", "configs/mine.yaml", "tools.summary")
    ran += (
        "tools.verify configs/quickstart.yaml",
        "tools.evaluate RUN --data",
        "tools.modes --length",  # tests/unit/test_modes_table.py
        "tools.report RUN",
        "torchrun --standalone",
        "tests/kills.py",
    )
    left = [
        f"{page}: {command}"
        for page in PAGES
        for command in commands(page)
        if not any(words in command for words in (*ran, *NOT_RUN))
    ]
    assert left == []
