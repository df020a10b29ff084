"""Recipes in configs/ for real models: what their names say, memory, dry runs.

Their numbers and parameters against the published models: test_published.py.
"""

import contextlib
import functools
import io
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from megatron_bp.arguments.parse import parsed
from megatron_bp.arguments.task import layout_of, task_of
from megatron_bp.parallel.mode import parallel_mode
from megatron_bp.planning.hardware import gpu_named
from megatron_bp.planning.step import counted, most_memory

CONFIGS = Path(__file__).parents[2] / "configs"
PAGE = CONFIGS.parent / "docs" / "running.md"
NAME = re.compile(
    r"(?P<model>(?:nemotron|qwen3)_[\d.]+b)_(?P<mode>single|csbp)_(?P<task>sft|conversion)"
    r"_(?P<k>\d+)k_(?:(?P<nodes>\d)x)?(?P<gpus>\d)h200(?:_(?P<objective>nvidia|fast_dllm_v2))?"
)
RECIPES = sorted(path.stem for path in CONFIGS.glob("*h200*.yaml"))
NEMOTRON = ("nemotron_3b", "nemotron_8b", "nemotron_14b")
# Flags that say what is trained: those of BD3-LM, and where an objective has others.
BOUND = {
    "noise": "absorbing",
    "noise_per": "block",
    "noise_schedule": "linear",
    "noise_interval": [0.001, 1.0],
    "antithetic": False,
    "corrupted_copies": 1,
    "complementary_copies": False,
    "never_corrupt_ids": [],
    "alignment": "same",
    "scored_tokens": "corrupted",
    "loss_weighting": "bound",
    "loss_count": "supervised",
    "exclude_mask_logit": False,
    "diffusion_loss_weight": 1.0,
    "ar_loss_weight": 0.0,
    "self_conditioning": 0.0,
    "clean_relation": "block",
    "own_relation": "bidirectional",
}
OBJECTIVES = {
    "paper": {"diffusion_block_size": 256},
    "nvidia": {
        "diffusion_block_size": 64,
        "noise_per": "document",
        "loss_weighting": "inverse_p",
        "loss_count": "joint",
        "clean_relation": "token",
        "diffusion_loss_weight": 0.3,
        "ar_loss_weight": 1.0,
    },
    "sdar": {"diffusion_block_size": 32},
    "fast_dllm_v2": {
        "diffusion_block_size": 32,
        "alignment": "next",
        "corrupted_copies": 2,
        "complementary_copies": True,
        "loss_weighting": "one",
    },
}
RATES = {"sft": 1e-5, "conversion": 2e-5}


@dataclass(frozen=True)
class Told:
    """What a recipe's name says."""

    model: str
    mode: str
    task: str
    tokens: int
    nodes: int
    gpus: int  # in all
    objective: str


def told(name: str) -> Told:
    found = NAME.fullmatch(name)
    assert found is not None, name
    nodes = int(found["nodes"] or 1)
    usual = "paper" if found["task"] == "sft" else "sdar"
    return Told(
        found["model"],
        found["mode"],
        found["task"],
        1024 * int(found["k"]),
        nodes,
        nodes * int(found["gpus"]),
        found["objective"] or usual,
    )


@functools.cache
def arguments(name: str) -> Any:
    return parsed([str(CONFIGS / f"{name}.yaml")])[1]


@functools.cache
def gpu_bytes(name: str) -> tuple[int, int]:
    """Estimated for the GPU that holds most, of the recipe's own layout; all, and torch's of it."""
    args = arguments(name)
    task, layout = task_of(args), layout_of(args, told(name).gpus)
    _, held = most_memory(task, layout, counted(task, layout))
    return held.total, held.total - held.parts["process"]


def test_every_variant_is_there() -> None:
    every = [told(name) for name in RECIPES]
    for task, objectives in (
        ("sft", {"paper", "nvidia"}),
        ("conversion", {"sdar", "fast_dllm_v2"}),
    ):
        of_task = [one for one in every if one.task == task]
        assert {one.gpus for one in of_task} == {1, 8, 16}
        assert {one.objective for one in of_task} == objectives
    assert {one.tokens // 1024 for one in every if one.task == "sft"} == {64, 128, 256, 512}
    for model in NEMOTRON:
        of_model = [one for one in every if one.model == model]
        assert {one.objective for one in of_model} == {"paper", "nvidia"}
        assert {one.gpus for one in of_model} >= {8, 16}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_what_its_name_says_and_fits(name: str) -> None:
    said, args = told(name), arguments(name)
    assert args.seq_length == said.tokens
    mode = parallel_mode(args.block_parallel_size, args.context_parallel_size)
    assert mode.lower() == said.mode
    want = BOUND | OBJECTIVES[said.objective]
    assert {flag: getattr(args, flag) for flag in want} == want
    assert (args.bf16, args.lr) == (True, RATES[said.task])
    assert args.chats == (said.task == "sft")
    assert args.block_grid == ("response" if said.task == "sft" else "document")
    assert gpu_bytes(name)[1] <= 0.9 * gpu_named("h200").memory, "a tenth stays free"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_how_it_is_started(name: str) -> None:
    said = told(name)
    text = (CONFIGS / f"{name}.yaml").read_text()
    head = [line[2:].strip() for line in text.splitlines() if line.startswith("#")]
    commands = " ".join(head[2:]).replace("\\ ", "")
    script = "many_nodes" if said.nodes > 1 else "one_node"
    options = {1: "--gpus-per-node=1 "}.get(said.gpus, "")
    assert (CONFIGS.parent / f"scripts/slurm/{script}.sbatch").is_file()
    assert commands == (
        f"python -m megatron_bp.tools.convert import HF_FOLDER checkpoints/{said.model} "
        f"sbatch {options}scripts/slurm/{script}.sbatch configs/{name}.yaml "
        f"--data-path PREFIX --pretrained-checkpoint checkpoints/{said.model} "
        f"--save runs/{name} --load runs/{name}"
    )


def test_the_page_has_every_recipe_with_its_numbers() -> None:
    rows = re.findall(r"^\| `(.*h200.*)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    found = {name: cells.split(" | ") for name, cells in rows}
    named = {"paper": "paper", "nvidia": "NVIDIA", "sdar": "SDAR", "fast_dllm_v2": "Fast-dLLM v2"}
    want = {}
    for name in RECIPES:
        said = told(name)
        cells = (said.gpus, f"{said.tokens // 1024}K", named[said.objective])
        want[name] = [*map(str, cells), f"{gpu_bytes(name)[0] / 2**30:.1f}"]
    assert found == want, "\n".join(f"| `{n}` | {' | '.join(c)} |" for n, c in want.items())


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("qwen3")])
def test_the_mask_of_qwen3_is_the_first_row_that_is_no_id(name: str) -> None:
    args = arguments(name)
    assert args.mask_token_id == args.vocab_size - 1 == 151669


def dry_runs(rank: int, world: int, recipes: list[tuple[str, int]], folder: str) -> list[Any]:
    """Exit status, error and JSON of the dry run of each recipe on so many GPUs."""
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.training import global_vars

    from megatron_bp.tools.dry_run.command import dry_run

    torch.distributed.destroy_process_group()
    found: list[Any] = []
    for path, gpus in recipes:
        file, error, code = Path(folder) / "found.json", io.StringIO(), 0
        os.environ.pop("WORLD_SIZE", None)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
            try:
                flags = ["--dry-run-world-size", str(gpus), "--dry-run-json", str(file)]
                dry_run([path, "--dry-run", *flags])
            except SystemExit as end:
                code = int(end.code or 0)
            finally:
                global_vars.unset_global_variables()
                destroy_num_microbatches_calculator()
        facts = json.loads(file.read_text()) if file.exists() else {}
        file.unlink(missing_ok=True)
        found.append((code, error.getvalue(), facts))
    return found


@pytest.mark.ranks
def test_the_dry_run_of_every_recipe_passes(tmp_path: Path) -> None:
    recipes = [(str(CONFIGS / f"{name}.yaml"), told(name).gpus) for name in RECIPES]
    ((*found,),) = run_ranks(1, dry_runs, recipes, str(tmp_path), fresh=True, timeout=400)
    for name, (code, error, facts) in zip(RECIPES, found, strict=True):
        assert code == 0, f"{name}: {error}"
        assert facts["parameters"]["planned"] == facts["parameters"]["total"], name
        assert facts["notes"] == [n for n in facts["notes"] if "no such file" in n], name
