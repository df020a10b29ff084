"""Recipes and conversion against published models: every number, and the count of parameters."""

from argparse import Namespace
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from published import PUBLISHED

from megatron_bp.arguments.config_file import to_flags
from megatron_bp.arguments.contract import differences
from megatron_bp.arguments.flags import full_parser
from megatron_bp.arguments.parse import parsed
from megatron_bp.arguments.task import task_of
from megatron_bp.tools.convert.families import HuggingFace
from megatron_bp.tools.convert.saved import COMPARED

CONFIGS = Path(__file__).parents[2] / "configs"
NUMBERS = tuple(dict.fromkeys((*COMPARED, "init_method_std", "layernorm_epsilon")))


def model_of(recipe: Path) -> str | None:
    """The file of configs/models that a run includes, if any."""
    found = (yaml.safe_load(recipe.read_text()) or {}).get("include") or []
    files = [Path(name) for name in ([found] if isinstance(found, str) else found)]
    (name, *more) = [file.stem for file in files if file.parent.name == "models"] or [None]
    assert not more, f"{recipe.name} includes several models"
    return name


RECIPES = {path.stem: name for path in sorted(CONFIGS.glob("*.yaml")) if (name := model_of(path))}


@cache
def count_of_transformers(name: str) -> int:
    """Parameters of transformers' class, on the meta device."""
    import transformers

    model = HuggingFace(PUBLISHED[name][0])
    with torch.device("meta"):
        network = getattr(transformers, model.family.architecture)(model.config)
    network.tie_weights()
    return sum(parameter.numel() for parameter in network.parameters())


@cache
def converted(name: str) -> Namespace:
    """Arguments of the model that conversion makes of config.json."""
    model = HuggingFace(PUBLISHED[name][0])
    flags = {**model.flags, "padded_vocab_size": model.config.vocab_size}
    return parsed(to_flags(flags, full_parser(), "config.json"))[1]


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_parameters_are_as_many_as_published(name: str) -> None:
    count = count_of_transformers(name)
    assert round(count / 1e9, 2) == PUBLISHED[name][1]
    args = converted(name)
    args.seq_length, args.objective = 4096, "block_diffusion"
    assert task_of(args).shape.parameters == count


def test_every_recipe_is_of_a_published_model() -> None:
    assert len(RECIPES) >= 16
    assert set(RECIPES.values()) <= set(PUBLISHED), "tests/published.py lacks a model"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_the_published_model(recipe: str) -> None:
    name = RECIPES[recipe]
    args = parsed([str(CONFIGS / f"{recipe}.yaml")])[1]
    assert differences(converted(name), args, NUMBERS) == []
    assert task_of(args).shape.parameters == count_of_transformers(name)
    ids = {"mask_token_id": args.mask_token_id, "eos_token_id": args.null_tokenizer_eod_id}
    published = PUBLISHED[name][0]
    assert ids == {name: published.get(name, id) for name, id in ids.items()}
