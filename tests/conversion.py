"""Runs in mode "ar" and runs that start from them, for tests to compare with the oracle.

`convert_on_rank` is pretrain_bdlm.py with the check of conversion watched, and with a fault if one
is named.
"""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import oracle
import torch
from entry import pretrain
from torch import Tensor

SHAPE = oracle.GPTShape(
    layers=4, hidden=32, heads=4, groups=2, head_dim=8, eps=1e-6, qk_layernorm=True
)
MODEL = """
    --num-layers 4 --group-query-attention --num-query-groups 2 --qk-layernorm
    --init-method-std 0.15 --norm-epsilon 1e-6 --make-vocab-size-divisible-by 2 --seq-length 40
"""
OLD, NEW = 121, 258  # true ids: the AR model's, the converted one's
AR = f"""
    --objective ar --vocab-size {OLD} --null-tokenizer-eod-id {OLD - 1} {MODEL}
"""
FAULTS = (
    "rotary base",
    "a layer's weight",
    "block-causal clean rows",
    "rows missing",
)


def ar_head(head: list[str]) -> list[str]:
    """The head of a command line of `launch.make_data`, without what corrupted rows need."""
    config = Path(head[0])
    plain = config.with_name("ar.yaml")
    nothing = "  mask_token_id: null\n  diffusion_block_size: null\n"
    plain.write_text(f"include: {config.name}\nno_corrupted_rows:\n{nothing}")
    return [str(plain), *head[1:], *AR.split()]


def convert_on_rank(
    rank: int, world: int, arguments: list[str], fault: str | None = None
) -> dict[str, Any]:
    """One rank: exit code, standard error, and the clean rows' logits that the check saw.

    The logits are those of true ids of the checkpoint, [C, V], with their positions and the tokens.
    """
    from megatron_bp.training import conversion

    seen: dict[str, Any] = {}
    compare, ours, longest = conversion._compare, conversion._ours, conversion.longest_document

    def longest_document(samples: Any) -> Any:
        sample = longest(samples)
        seen["tokens"] = torch.from_numpy(sample.tokens).long()
        return sample

    def watched(found: Any, exact: Any, vocabulary: int, length: int, model: Any) -> Any:
        if found.hidden is not None and "logits" not in seen:
            group = model.pg_collection.tp
            seen["positions"] = found.positions.clone()
            seen["logits"] = conversion._logits(found.hidden, found.weight, vocabulary, group)
        return compare(found, exact, vocabulary, length, model)

    def faulty(chunks: list[Any], settings: Any, sample: Any) -> Any:
        if fault == "rotary base":
            chunks[0].rotary_pos_emb.frequencies[1] *= 1.5
        if fault == "a layer's weight" and chunks[0].pre_process:
            with torch.no_grad():
                chunks[0].decoder.layers[0].mlp.linear_fc2.weight[0, 0] += 0.05
        tap = ours(chunks, settings, sample)
        if fault == "rows missing" and tap.hidden is not None:
            tap.hidden, tap.positions = tap.hidden[1:], tap.positions[1:]
        return tap

    def block_causal(options: Any) -> Any:
        return dataclasses.replace(options, clean_relation="block", score_clean="all")

    conversion.longest_document, conversion._compare = longest_document, watched
    conversion._ours = faulty
    if fault == "block-causal clean rows":
        conversion.token_causal = block_causal
    if fault == "nothing grows":
        vocabulary = importlib.import_module("megatron_bp.training.start")
        vocabulary.grow = lambda *args: None
    if fault == "main params stay":
        mend_main_params()
    code, error = pretrain(rank, world, arguments)
    return {"code": code, "error": error, **seen}


def mend_main_params() -> None:
    """Optimizers that do not read the model's parameters again."""
    from megatron.core.optimizer import optimizer

    reload = optimizer.ChainedOptimizer.reload_model_params
    calls = []

    def first_alone(self: Any, state_dict: Any = None) -> None:
        calls.append(1)
        if len(calls) == 1:  # Megatron's own, right after loading
            reload(self, state_dict)

    for kind in (optimizer.ChainedOptimizer, optimizer.MixedPrecisionOptimizer):
        kind.reload_model_params = first_alone


def weights_on_rank(rank: int, world: int, path: str) -> dict[str, Tensor]:
    """The parameters in a checkpoint by the names of Megatron's local spec, a layer each."""
    from megatron.core import dist_checkpointing

    weights = {}
    for name, tensor in dist_checkpointing.load_plain_tensors(path).items():
        if name.startswith("optimizer") or not isinstance(tensor, Tensor):
            continue
        name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        name = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        if not name.startswith("decoder.layers."):
            weights[name] = tensor
            continue
        for layer, part in enumerate(tensor):  # layers are stored stacked
            weights[name.replace("layers.", f"layers.{layer}.", 1)] = part
    return weights


def ar_on_rank(rank: int, world: int, arguments: list[str]) -> dict[str, Any]:
    """A run in mode "ar" on one rank: exit code, standard error, and its batches, in order."""
    from megatron_bp.training import ar

    batches, make = [], ar.make_batch

    def kept(samples: Any, multiple: int = 1) -> Any:
        batches.extend((s.tokens, s.document, s.supervised) for s in samples)
        return make(samples, multiple)

    ar.make_batch = kept
    code, error = pretrain(rank, world, arguments)
    return {"code": code, "error": error, "rows": batches}
