"""A checkpoint as one of a Hugging Face model: the right one, or refused."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from megatron_bp.arguments.contract import MODEL, differences, newest_checkpoint, saved_arguments
from megatron_bp.arguments.contract import told as in_words
from megatron_bp.arguments.from_checkpoint import SHAPES
from megatron_bp.tools.convert.families import HuggingFace
from megatron_bp.tools.convert.model import megatron_arguments
from megatron_bp.tools.convert.refused import ConvertError

OF_TRAINING = ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff")
NO_PART = ("optimizer", "bf16", *OF_TRAINING)
COMPARED = tuple(name for name in dict.fromkeys((*SHAPES, *MODEL)) if name not in NO_PART)


@dataclass(frozen=True, eq=False)
class Saved:
    """A checkpoint of the model.

    Attributes:
        folder: an iter_ folder, or "release".
        was: the arguments saved in it.
        args: of the model in one process.
    """

    folder: Path
    was: Namespace
    args: Namespace


def saved(model: HuggingFace, checkpoint: Path, step: int | None = None) -> Saved:
    """The newest checkpoint of the folder, or that of a step.

    Raises:
        ConvertError: there is none, or it is of another model than config.json's.
    """
    folder = newest_checkpoint(str(checkpoint), step)
    if folder is None:
        raise ConvertError(
            f"{checkpoint} holds no checkpoint"
            + (f" of step {step}" if step is not None else "")
            + "; give the folder that a run's --save, or import, wrote"
        )
    was = saved_arguments(folder)
    rows = getattr(was, "padded_vocab_size", None)
    if rows is None:
        raise ConvertError(f"{folder} holds no arguments of Megatron, so its table is not known")
    rows = int(rows)
    known = getattr(was, "bdlm_vocabulary", None)
    args = megatron_arguments(model, rows, min(rows, int(known or model.config.vocab_size)))
    # Which flags of frequencies mean something depends on their kind.
    kind = args.position_embedding_type
    names = [n for n in COMPARED if kind == "yarn" or not n.startswith(("yarn", "mscale"))]
    if found := differences(was, args, tuple(names)):
        raise ConvertError(
            f"{folder} is of another model than config.json says: {in_words(found)} (config.json); "
            f"give the Hugging Face folder of the model that was trained"
        )
    return Saved(folder, was, args)
