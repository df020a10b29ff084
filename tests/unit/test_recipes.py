"""Recipes in configs/ for real models: what their names say, parameters, memory, dry runs."""

import contextlib
import io
import json
import os
import re
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
NAME = re.compile(r"nemotron_(\d+b)_(single|csbp)_sft_(\d+)k_(?:(\d)x)?(\d)h200(_nvidia)?")
RECIPES = sorted(path.stem for path in CONFIGS.glob("nemotron_*.yaml"))
SIZES = {
    "3b": (26, 3072, 9216, True),
    "8b": (34, 4096, 14336, False),
    "14b": (40, 5120, 16384, False),
}


def told(name: str) -> tuple[str, str, int, int, bool]:
    """(size, mode, tokens, GPUs, whether the objective is NVIDIA's), as the name says."""
    found = NAME.fullmatch(name)
    assert found is not None, name
    size, mode, context, nodes, gpus, nvidia = found.groups()
    return size, mode, int(context) * 1024, int(nodes or 1) * int(gpus), nvidia is not None


def arguments(name: str) -> Any:
    return parsed([str(CONFIGS / f"{name}.yaml")])[1]


def test_every_variant_is_there() -> None:
    every = [told(name) for name in RECIPES]
    assert {gpus for _, _, _, gpus, _ in every} == {1, 8, 16}
    for size in SIZES:
        of_size = [one for one in every if one[0] == size]
        assert {nvidia for *_, nvidia in of_size} == {False, True}
        assert {gpus for _, _, _, gpus, _ in of_size} >= {8, 16}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_what_its_name_says_and_fits(name: str) -> None:
    _, mode, tokens, gpus, nvidia = told(name)
    args = arguments(name)
    assert args.seq_length == tokens
    assert parallel_mode(args.block_parallel_size, args.context_parallel_size).lower() == mode
    want = (
        ("nemotron", 64, 0.3, 1.0, "token") if nvidia else ("block_diffusion", 256, 1, 0, "block")
    )
    got = (args.objective, args.diffusion_block_size, args.diffusion_loss_weight)
    assert (*got, args.ar_loss_weight, args.clean_relation) == want
    assert args.chats
    assert args.block_grid == "response"
    task, layout = task_of(args), layout_of(args, gpus)
    _, held = most_memory(task, layout, counted(task, layout))
    of_gpu = gpu_named("h200")
    assert held.total - held.parts["process"] <= 0.9 * of_gpu.memory, "a tenth stays free"


@pytest.mark.parametrize("size", SIZES)
def test_parameters_and_positions_are_those_of_transformers(size: str) -> None:
    from transformers import Ministral3Config, Ministral3ForCausalLM

    layers, hidden, width, tied = SIZES[size]
    config = Ministral3Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=width,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        model = Ministral3ForCausalLM(config)
    model.tie_weights()
    count = sum(parameter.numel() for parameter in model.parameters())
    (name, *_) = (name for name in RECIPES if told(name)[0] == size)
    args, rope = arguments(name), config.rope_parameters
    assert task_of(args).shape.parameters == count
    assert (args.kv_channels, args.layernorm_epsilon) == (config.head_dim, config.rms_norm_eps)
    assert args.init_method_std == config.initializer_range
    assert {
        "rope_theta": args.rotary_base,
        "factor": args.rotary_scaling_factor,
        "original_max_position_embeddings": args.yarn_original_max_position_embeddings,
        "beta_fast": args.yarn_beta_fast,
        "beta_slow": args.yarn_beta_slow,
        "mscale": args.mscale,
        "mscale_all_dim": args.mscale_all_dim,
        "llama_4_scaling_beta": args.query_scale_beta,
    }.items() <= dict(rope).items()
    assert args.query_scale_length == rope["original_max_position_embeddings"]


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


@pytest.mark.slow
@pytest.mark.ranks
def test_the_dry_run_of_every_recipe_passes(tmp_path: Path) -> None:
    recipes = [(str(CONFIGS / f"{name}.yaml"), told(name)[3]) for name in RECIPES]
    ((*found,),) = run_ranks(1, dry_runs, recipes, str(tmp_path), fresh=True, timeout=400)
    for name, (code, error, facts) in zip(RECIPES, found, strict=True):
        assert code == 0, f"{name}: {error}"
        assert facts["parameters"]["planned"] == facts["parameters"]["total"], name
        assert facts["notes"] == [n for n in facts["notes"] if "no such file" in n], name
