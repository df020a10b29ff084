"""The families of models that can be converted, and why others cannot."""

from typing import Any

from megatron_bp.tools.convert.families import (
    llama,
    ministral3,
    mistral,
    nemotron_labs_diffusion,
    qwen2,
    qwen3,
    qwen3_moe,
)
from megatron_bp.tools.convert.families.common import Family, heads_of, model_flags, weights
from megatron_bp.tools.convert.refused import ConvertError
from megatron_bp.tools.convert.rules import check_experts, check_numbers
from megatron_bp.tools.convert.weights import Heads, Weight

__all__ = ["Family", "HuggingFace"]

MODULES = (llama, mistral, ministral3, nemotron_labs_diffusion, qwen2, qwen3, qwen3_moe)
FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in MODULES}
REFUSED = {
    "qwen3_5": "a hybrid of linear and full attention",
    "qwen3_next": "a hybrid of linear and full attention",
    "qwen3_8": "a hybrid of linear and full attention",
    "gemma": "norms, activation and head of the Gemma family",
    "diffusion_gemma": "the DiffusionGemma architecture",
    "llada": "the LLaDA architecture",
    "llada2": "the LLaDA2 architecture",
}
PARTS = ("text_config", "vision_config", "audio_config", "thinker_config")


class HuggingFace:
    """A model as its config.json describes it.

    Attributes:
        config: of transformers.
        family, heads: of the model.
        flags: the model in flags of this project, name in snake case -> value.
        weights: all of them.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        """From the content of config.json.

        Raises:
            ConvertError: a model that this project does not convert.
        """
        self.family = family_of(values)
        check_numbers(values)
        from transformers import CONFIG_MAPPING

        values = of_transformers(values)
        try:
            self.config: Any = CONFIG_MAPPING[values["model_type"]].from_dict(values)
        except Exception as error:  # its checks raise errors of many kinds
            told = " ".join(str(error).split())
            raise ConvertError(f"config.json: transformers cannot read it: {told}") from error
        if self.family.experts:
            check_experts(self.config)
        try:
            self.heads: Heads = heads_of(self.config)
            self.flags = model_flags(self.family, self.config)
        except (TypeError, KeyError, AttributeError, ArithmeticError) as error:
            raise ConvertError(f"config.json: a value of a wrong kind: {error!r}") from error
        at = qwen3_moe.experts_at(self.config) if self.family.experts else None
        self.weights: list[Weight] = weights(self.family, self.config, at)


def of_transformers(values: dict[str, Any]) -> dict[str, Any]:
    """The content of config.json as a class of transformers has it.

    Where the class is in the folder, that of its trunk, with what the trunk knows of the settings.
    """
    from transformers import CONFIG_MAPPING

    kind = family_of(values).read_as
    if kind is None:
        return values
    known = CONFIG_MAPPING[kind]().to_dict().keys() - {"tie_word_embeddings"}  # a head of its own
    kept = {name: value for name, value in values.items() if name in known | {"mask_token_id"}}
    return kept | {"model_type": kind, "tie_word_embeddings": False}


def family_of(values: dict[str, Any]) -> Family:
    """Of a config.json.

    Raises:
        ConvertError: none of ours.
    """
    kind = str(values.get("model_type"))
    known = [name for name in REFUSED if kind == name or kind.startswith(name)]
    if known:
        longest = max(known, key=len)
        raise ConvertError(f"model_type {kind}: {REFUSED[longest]} is not implemented")
    for part in PARTS:
        if part in values:
            raise ConvertError(
                f"model_type {kind}: config.json has a {part}, and models of several kinds of "
                f"input are not converted; save its language model alone, as docs/converting.md "
                f"tells"
            )
    if values.get("quantization_config") is not None:
        raise ConvertError("config.json has a quantization_config: use the unquantized weights")
    if kind in FAMILIES:
        return FAMILIES[kind]
    raise ConvertError(
        f"model_type {kind}: is none of {', '.join(FAMILIES)}. If its network and the names of its "
        f"tensors are those of one of these, write that model_type in its config.json; another "
        f"kind is a file in megatron_bp/tools/convert/families/"
    )
