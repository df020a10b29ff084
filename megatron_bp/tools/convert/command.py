"""The command line of `python -m megatron_bp.tools.convert`."""

import argparse
import contextlib
import io
import logging
import sys
import warnings
from pathlib import Path

from megatron_bp import cpu


def parser() -> argparse.ArgumentParser:
    """Of the three commands."""
    main = argparse.ArgumentParser(
        prog="python -m megatron_bp.tools.convert",
        description="Models between Hugging Face folders and Megatron checkpoints.",
    )
    commands = main.add_subparsers(dest="command", required=True)
    about = {
        "import": "a Hugging Face folder to a checkpoint for --pretrained-checkpoint",
        "export": "a checkpoint to a Hugging Face folder",
        "check": "compare logits of a folder and a checkpoint",
    }
    for name, text in about.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("hf_folder", type=Path, metavar="HF_FOLDER")
        command.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
        if name != "import":
            command.add_argument("--step", type=int, help="of the checkpoint; else the newest")
        if name == "export":
            command.add_argument(
                "--like",
                type=Path,
                help="the folder the model came from; else CHECKPOINT/hugging_face, as import "
                "leaves it",
            )
            command.add_argument("--tokenizer", type=Path, help="a folder; else that of --like")
            command.add_argument("--shard-gb", type=float, default=5.0, help="of a file; 5")
    return main


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
        size = int(options.shard_gb * 1e9)
        export_folder(like, checkpoint, source, options.step, options.tokenizer, size)
        print(f"{source}: written; transformers loads it")
    else:
        from megatron_bp.tools.convert.checking import check_folder

        found = check_folder(source, checkpoint, options.step)
        print(found.told())
        if not found.holds:
            raise SystemExit(1)
