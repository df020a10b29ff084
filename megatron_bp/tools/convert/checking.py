"""Do a Hugging Face folder and a checkpoint hold the same model? Logits on the same tokens.

The checkpoint's are those of clean rows under the token-causal relation in the model that this
project trains; the folder's are those of transformers. Both in float32, one after the other.
"""

# Shapes: T tokens, V ids that both tables have.

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bp.tools.convert.families import HuggingFace
from megatron_bp.tools.convert.folder import Folder
from megatron_bp.tools.convert.model import build, one_process, sharded
from megatron_bp.tools.convert.refused import ConvertError
from megatron_bp.tools.convert.saved import Saved, saved

NEAR, SHORT = 1024, 64  # tokens of the row at position 0, and of rows far out
STARTS = (8160, 16352, 65504)  # of the rows far out; each crosses a multiple of 8192
ALLOWED = {"near": 1e-5, "far": 1e-3}  # transformers has its angles in float32
SEED = 1


@dataclass(frozen=True)
class Row:
    """Tokens at consecutive positions, and how far the two models' logits are apart there.

    Attributes:
        start: first position.
        tokens: how many.
        worst: norm of the difference of a token's logits, relative to the rows' mean norm.
        allowed: what it may be.
    """

    start: int
    tokens: int
    worst: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether they agree; NaN does not."""
        return self.worst <= self.allowed

    def told(self) -> str:
        """In words."""
        return (
            f"positions {self.start} to {self.start + self.tokens - 1}: logits differ by at most "
            f"{self.worst:.2e}, relative ({self.allowed:.0e} allowed)"
            + ("" if self.holds else ": NOT the same model")
        )


def check_folder(source: Path, checkpoint: Path, step: int | None = None) -> list[Row]:
    """Compare at position 0 and far out, as far as the model's positions go."""
    folder = Folder(source)
    model = HuggingFace(folder.config)
    found = saved(model, checkpoint, step)
    vocabulary = min(int(model.config.vocab_size), int(found.args.padded_vocab_size))
    rows = list(_rows(model, vocabulary))
    theirs = list(_theirs(folder, model, rows))
    with one_process():
        ours = _ours(found, rows)
    return [
        _compared(start, mine[:, :vocabulary], other[:, :vocabulary])
        for (start, _), mine, other in zip(rows, ours, theirs, strict=True)
    ]


def _rows(model: HuggingFace, vocabulary: int) -> Iterator[tuple[int, Tensor]]:
    """(first position, int64[T])."""
    length = model.config.max_position_embeddings
    generator = torch.Generator().manual_seed(SEED)
    places = [(0, min(NEAR, length)), *((start, SHORT) for start in STARTS)]
    for start, tokens in places:
        if start + tokens <= length:
            yield start, torch.randint(vocabulary, (tokens,), generator=generator)


def _compared(start: int, ours_TV: Tensor, theirs_TV: Tensor) -> Row:
    true, found = theirs_TV.double(), ours_TV.double()
    error, norm = (found - true).norm(dim=1), true.norm(dim=1).mean()
    worst = float((error / norm).max()) if torch.isfinite(error).all() else float("nan")
    return Row(start, len(true), worst, ALLOWED["far" if start else "near"])


def _theirs(
    folder: Folder, model: HuggingFace, rows: list[tuple[int, Tensor]]
) -> Iterator[Tensor]:
    """float32[T, V] of each row, by transformers."""
    import transformers

    architecture = getattr(transformers, model.family.architecture)
    network = architecture.from_pretrained(
        folder.path,
        config=model.config,
        dtype=torch.float32,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
    ).eval()
    for start, tokens in rows:
        at = torch.arange(start, start + len(tokens))[None]
        with torch.no_grad():
            out = network(input_ids=tokens[None], position_ids=at, use_cache=False)
        yield out.logits[0]


def _ours(found: Saved, rows: list[tuple[int, Tensor]]) -> list[Tensor]:
    """float32[T, V] of each row, by the model of this project."""
    from megatron_bp.arguments.attention import attention_options

    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = build(found.args, device)
    _load(network, found)
    options = attention_options(found.args)
    with torch.no_grad():
        return [_clean_logits(network, options, *row, device) for row in rows]


def _load(network: Any, found: Saved) -> None:
    from megatron.core import dist_checkpointing

    state = {"model": sharded(network)}
    with contextlib.redirect_stdout(io.StringIO()):
        loaded = dist_checkpointing.load(state, str(found.folder))
    keys = network.load_state_dict(loaded["model"], strict=False)
    missing = [key for key in keys.missing_keys if not key.endswith("_extra_state")]
    if missing:
        raise ConvertError(f"{found.folder} has no {', '.join(missing)}, which the model needs")


def _clean_logits(
    network: Any, options: Any, start: int, tokens: Tensor, device: str
) -> Tensor:
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
        dist.group.WORLD,
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
