"""Do a Hugging Face folder and a checkpoint hold the same model? Logits on the same tokens.

The checkpoint's are those of clean rows under the token-causal relation in the model that this
project trains; the folder's are those of transformers. Both in float32, one after the other.

transformers keeps its frequencies and angles in float32, which at position 65536 is off by
hundredths of a radian. So there are two comparisons: with transformers as it is, coarse; and sharp
with the angles of both from one table, once the two tables of frequencies are seen to agree.
"""

# Shapes: T tokens, V ids that both tables have.

import contextlib
import dataclasses
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bp.tools.convert.agreement import SAME, Agreement, Row, distance
from megatron_bp.tools.convert.checkpoint import Reader
from megatron_bp.tools.convert.families import HuggingFace
from megatron_bp.tools.convert.folder import WeightFolder
from megatron_bp.tools.convert.matching import same_names, same_tables
from megatron_bp.tools.convert.model import build, one_process, sharded_weights
from megatron_bp.tools.convert.refused import ConvertError
from megatron_bp.tools.convert.saved import Saved, saved
from megatron_bp.tools.convert.te import stored

NEAR, SHORT = 1024, 64  # tokens of the row at position 0, and of rows far out
# Of the rows far out; all but the last two cross a multiple of 8192, and the last ends at 2 ** 20.
STARTS = (8160, 16352, 131040, 524224, 1048512)
SEED = 1
HEAD = "lm_head.weight"  # in transformers


def check_folder(
    source: Path, checkpoint: Path, step: int | None = None, allowed: float = SAME
) -> Agreement:
    """Compare at position 0 and far out, as far as the model's positions go.

    Args:
        source: a Hugging Face folder.
        checkpoint: of a run, or imported.
        step: of the checkpoint; None for the newest.
        allowed: relative distance of logits.
    """
    folder = WeightFolder(source)
    model = HuggingFace(folder.config)
    same_names(folder, model)  # transformers would fill in what is missing with random numbers
    same_tables(folder, model)
    found = saved(model, checkpoint, step)
    vocabulary = min(int(model.config.vocab_size), int(found.args.padded_vocab_size))
    rows = list(_rows(model, vocabulary))
    theirs, as_it_is, frequencies = _theirs(folder, model, rows)
    with one_process():
        ours, mine = _ours(found, rows, frequencies)
    apart = float(((mine - frequencies) / mine).abs().max())
    return Agreement(
        [
            Row(
                start,
                len(tokens),
                distance(own[:, :vocabulary], same[:, :vocabulary]),
                distance(own[:, :vocabulary], other[:, :vocabulary]),
                allowed,
            )
            for (start, tokens), own, same, other in zip(rows, ours, theirs, as_it_is, strict=True)
        ],
        apart,
    )


def _rows(model: HuggingFace, vocabulary: int) -> Iterator[tuple[int, Tensor]]:
    """(first position, int64[T])."""
    length = model.config.max_position_embeddings
    generator = torch.Generator().manual_seed(SEED)
    places = [(0, min(NEAR, length)), *((start, SHORT) for start in STARTS)]
    for start, tokens in places:
        if start + tokens <= length:
            yield start, torch.randint(vocabulary, (tokens,), generator=generator)


def _theirs(
    folder: WeightFolder, model: HuggingFace, rows: list[tuple[int, Tensor]]
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """float32[T, V] of each row by transformers: with exact angles; as it is; its frequencies."""
    import transformers

    family = model.family
    names = {f"^{re.escape(family.trunk)}": "model.", f"^{re.escape(family.head)}$": HEAD}
    architecture = getattr(transformers, family.architecture)
    try:
        network = architecture.from_pretrained(
            folder.path,
            config=model.config,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            **({"key_mapping": names} if family.read_as else {}),
            **({"experts_implementation": "eager"} if family.experts else {}),
        ).eval()
    except (RuntimeError, ArithmeticError, TypeError) as error:  # of shapes, and of nonsense
        told = " ".join(str(error).split())
        raise ConvertError(f"{folder.path}: transformers cannot load it: {told}") from error

    def logits() -> list[Tensor]:
        found = []
        for start, tokens in rows:
            at = torch.arange(start, start + len(tokens))[None]
            with torch.no_grad():
                out = network(input_ids=tokens[None], position_ids=at, use_cache=False)
            found.append(out.logits[0])
        return found

    as_it_is = logits()
    rotary = network.model.rotary_emb
    frequencies = rotary.inv_freq.double()

    def exact(x: Tensor, position_ids: Tensor, *unused: Any, **also: Any) -> tuple[Tensor, Tensor]:
        half = position_ids[..., None].double() * frequencies
        angles, factor = torch.cat((half, half), dim=-1), rotary.attention_scaling
        return (angles.cos() * factor).to(x.dtype), (angles.sin() * factor).to(x.dtype)

    rotary.forward = exact
    return logits(), as_it_is, frequencies


def _ours(
    found: Saved, rows: list[tuple[int, Tensor]], frequencies: Tensor
) -> tuple[list[Tensor], Tensor]:
    """float32[T, V] of each row with these frequencies; and the model's own."""
    from megatron_bp.arguments.attention import attention_options

    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = build(found.args, device)
    load(network, found)
    options = attention_options(found.args)
    rotary = network.rotary_pos_emb
    own = rotary.frequencies.cpu() / (rotary.seq_len_interpolation_factor or 1)
    rotary.frequencies = frequencies * (rotary.seq_len_interpolation_factor or 1)
    with torch.no_grad():
        return [_clean_logits(network, options, *row, device) for row in rows], own


def load(network: Any, found: Saved) -> None:
    """Fill the model from the checkpoint. Collective."""
    from megatron.core import dist_checkpointing

    has = Reader(found.folder).has
    state = {"model": {n: _as_stored(value, has) for n, value in sharded_weights(network).items()}}
    with contextlib.redirect_stdout(io.StringIO()):
        loaded = dist_checkpointing.load(state, str(found.folder))
    keys = network.load_state_dict(loaded["model"], strict=False)
    missing = [key for key in keys.missing_keys if not key.endswith("_extra_state")]
    if missing:
        raise ConvertError(f"{found.folder} has no {', '.join(missing)}, which the model needs")


def _as_stored(weight: Any, has: Callable[[str], bool]) -> Any:
    return dataclasses.replace(weight, key=stored(weight.key, has))


def _clean_logits(network: Any, options: Any, start: int, tokens: Tensor, device: str) -> Tensor:
    """float32[T, V] of clean rows that see up to themselves, at true positions."""
    import numpy as np

    from megatron_bp.attention.layout import make_layout
    from megatron_bp.batch.shard import local_batch
    from megatron_bp.data.document import Document
    from megatron_bp.diffusion.corruption import corrupt
    from megatron_bp.diffusion.objective import Objective
    from megatron_bp.sequence.packing import pack
    from megatron_bp.sequence.plan import SequenceOptions, make_plan
    from megatron_bp.training.conversion import _Tap
    from megatron_bp.training.step import stage_windows

    length = len(tokens)
    document = Document(tokens.numpy().astype(np.int32), np.ones(length, dtype=np.bool_), 0)
    sample = pack([document], length)
    plan = make_plan(sample, SequenceOptions(32, clean_relation="token", score_clean="all"))
    corruption = corrupt(sample, plan, Objective(0, network.vocab_size, SEED, noise="uniform"))
    batch = local_batch(sample, plan, corruption, 0, 1)
    layout = make_layout(
        plan,
        batch.shards,
        0,
        set(stage_windows(network)),
        batch.position_ids.to(device) + start,
        network.pg_collection.clean_shard,
        options,
    )
    index = batch.index
    rows = torch.nonzero((torch.arange(len(index)) < batch.num_clean) & (index >= 0)).flatten()
    tap = _Tap(rows.to(device), index[rows].long().to(device))
    network(
        batch.input_ids.to(device)[None],
        layout.positions[None],
        None,
        packed_seq_params=layout,
        output_processor=tap,
        padding_mask=None,
    )
    if tap.hidden is None or tap.weight is None or len(tap.positions) != length:
        raise ConvertError(f"{len(tap.positions)} of {length} rows were computed")
    logits = (tap.hidden @ tap.weight.mT).float().cpu()
    return logits[torch.argsort(tap.positions).cpu()]
