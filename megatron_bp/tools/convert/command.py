"""The command line of `python -m megatron_bp.tools.convert`."""

import argparse
import contextlib
import io
import logging
import math
import sys
import warnings
from pathlib import Path

from megatron_bp import cpu
from megatron_bp.tools.convert.agreement import OWN_ANGLES, SAME


def parser() -> argparse.ArgumentParser:
    """Of the three commands."""
    main = argparse.ArgumentParser(
        prog="python -m megatron_bp.tools.convert",
        description="Models between Hugging Face folders and Megatron checkpoints; "
        "docs/converting.md tells more.",
    )
    commands = main.add_subparsers(dest="command", required=True)
    about = {
        "import": "a Hugging Face folder to a checkpoint, for --pretrained-checkpoint of a run",
        "export": "a checkpoint of a run to a Hugging Face folder",
        "check": "compare the logits of a Hugging Face folder and a checkpoint",
    }
    folder, checkpoint = (
        "a local folder with config.json and safetensors",
        "the folder of a run's --save, or that import wrote",
    )
    for name, text in about.items():
        command = commands.add_parser(name, help=text, description=text)
        written = "the folder to write"
        command.add_argument(
            "hf_folder",
            type=Path,
            metavar="HF_FOLDER",
            help=written if name == "export" else folder,
        )
        command.add_argument(
            "checkpoint",
            type=Path,
            metavar="CHECKPOINT",
            help=written if name == "import" else checkpoint,
        )
        if name != "import":
            command.add_argument(
                "--step", type=int, metavar="N", help="of the checkpoint; by default the newest"
            )
        if name == "check":
            command.add_argument(
                "--tolerance",
                type=positive,
                default=SAME,
                metavar="X",
                help="how far logits may be apart, relative (default: %(default)s); with "
                f"transformers' own float32 angles {OWN_ANGLES} times as far",
            )
        if name == "export":
            command.add_argument(
                "--like",
                type=Path,
                metavar="FOLDER",
                help="the Hugging Face folder the model came from (default: "
                "CHECKPOINT/hugging_face, which import leaves)",
            )
            command.add_argument(
                "--tokenizer",
                type=Path,
                metavar="FOLDER",
                help="with the run's tokenizer, if not that of --like",
            )
            command.add_argument(
                "--shard-gb",
                type=positive,
                default=5.0,
                metavar="GB",
                help="weights of a file (default: %(default)s)",
            )
    return main


def positive(text: str) -> float:
    """A number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: has to be above 0")
    return value


def main(argv: list[str] | None = None) -> None:
    """Run a command; exits with 2 and one line where it is refused, with 1 if a check fails."""
    options = parser().parse_args(argv)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # of GPUs and their packages
    if cpu.needed():
        with contextlib.redirect_stderr(io.StringIO()):
            cpu.install()  # before anything of Megatron is imported
    try:
        _run(options)
    except (ValueError, OSError) as error:
        print(f"convert: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def _run(options: argparse.Namespace) -> None:
    source, checkpoint = options.hf_folder, options.checkpoint
    if options.command == "import":
        from megatron_bp.tools.convert.importing import MODEL_FILE, import_folder

        import_folder(source, checkpoint)
        print(
            f"{checkpoint}: a run starts from it with --pretrained-checkpoint {checkpoint}; "
            f"include {checkpoint / MODEL_FILE} in its config"
        )
    elif options.command == "export":
        from megatron_bp.tools.convert.exporting import export_folder
        from megatron_bp.tools.convert.importing import KEPT

        like = options.like or checkpoint / KEPT
        if not like.is_dir():
            raise ValueError(
                f"{like} is no folder; name the Hugging Face folder that the model came from with "
                f"--like (import leaves a copy in its CHECKPOINT/{KEPT})"
            )
        size = int(options.shard_gb * 1e9)
        note = export_folder(like, checkpoint, source, options.step, options.tokenizer, size)
        print(f"{source}: written; transformers loads it" + (f"\nnote: {note}" if note else ""))
    else:
        from megatron_bp.tools.convert.checking import check_folder

        found = check_folder(source, checkpoint, options.step, options.tolerance)
        print(found.told())
        if not found.holds:
            raise SystemExit(1)
