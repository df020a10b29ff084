"""The model card of an exported folder: what the model was trained to do."""

from argparse import Namespace
from typing import Any

import yaml

from megatron_bp import __version__
from megatron_bp.arguments.contract import FIELDS, MODEL
from megatron_bp.tools.convert.families import HuggingFace

OF_OBJECTIVE = tuple(name for name in FIELDS if name not in MODEL)
USE = """\
It fills in masked tokens block by block: positions of a block start as the mask token (id {mask}),
and see the whole block and, under {relation}, what stands before it. `generate` of transformers
draws tokens one after another from left to right, which is not what the weights were trained for.
"""
PLAIN = "An autoregressive model: each token is predicted from those before it.\n"


def contract(was: Namespace) -> dict[str, Any]:
    """What was trained, from a checkpoint's saved arguments; empty for an autoregressive model."""
    if getattr(was, "objective", "ar") == "ar":
        return {}
    values = {name: getattr(was, name, None) for name in OF_OBJECTIVE}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value is not None
    }


def card(model: HuggingFace, words: dict[str, Any], mask: int | None) -> str:
    """README.md."""
    head = {"library_name": "transformers", "tags": ["block-diffusion"] if words else []}
    parts = [
        "---\n" + yaml.safe_dump(head, sort_keys=False) + "---\n",
        f"# A {'block diffusion' if words else 'language'} model ({model.family.architecture})\n",
        f"Exported by megatron_bp {__version__}.\n",
    ]
    if not words:
        return "\n".join([*parts, PLAIN])
    relation = f"`clean_relation: {words.get('clean_relation')}`"
    parts.append(USE.format(mask=mask, relation=relation))
    parts.append("## The contract\n\nWhat the weights mean; config.json has it as well.\n")
    parts.append("| field | value |\n|---|---|")
    parts += [f"| `{name}` | `{value}` |" for name, value in words.items()]
    return "\n".join(parts) + "\n"
