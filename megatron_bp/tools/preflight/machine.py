"""Checks of one rank and its machine: versions, arguments, data, checkpoint, what it can write."""

import hashlib
import os
import platform
import tempfile
from argparse import Namespace
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import megatron_bp
from megatron_bp import arguments
from megatron_bp.arguments.absent import DryRun, quiet
from megatron_bp.arguments.attention import attention_options
from megatron_bp.arguments.command_line import join
from megatron_bp.arguments.contract import AGAIN, newest_checkpoint
from megatron_bp.arguments.data_paths import data_prefixes, lacking
from megatron_bp.arguments.flags import full_parser
from megatron_bp.arguments.from_checkpoint import new_run
from megatron_bp.arguments.parse import checked, parsed
from megatron_bp.arguments.parse import refusal as refusal_of
from megatron_bp.arguments.versions import check_versions
from megatron_bp.data.indexed import check_lengths, read_index
from megatron_bp.data.supervised import supervised_of
from megatron_bp.tools.preflight.degrees import divisors, refusal
from megatron_bp.tools.preflight.findings import Finding
from megatron_bp.tools.preflight.shared import SavedFile, nearest
from megatron_bp.training.saving import check_load

PACKAGES = (
    *("megatron-core", "numpy", "transformers", "transformer-engine"),
    *("flash-attn", "flash-attn-3", "flash-attn-4"),
)
FOLDERS = ("load", "pretrained_checkpoint", "save")
ENDS = 1 << 16  # bytes at each end of a file that are read


class Look(DryRun):
    """As a dry run, but of the run as it is: its layers and its checkpoints are this machine's.

    Attributes:
        kernel: why there is no attention kernel here; None if there is one.
        checkpoint: what is wrong with what the run starts from; None if nothing is.
    """

    kernel: str | None = None
    checkpoint: str | None = None
    _named: tuple[str | None, ...] = ()

    def flags(self, flags: list[str]) -> list[str]:
        """The flags with what lets Megatron write nothing."""
        return quiet(flags)

    def without(self, args: Namespace) -> None:
        """Go on without the checkpoint and the kernel, if they are not here or broken."""
        self._named = tuple(getattr(args, name) for name in FOLDERS)
        try:
            check_load(args)
            checkpoint(args)
        except (ValueError, OSError) as error:
            self.checkpoint = str(error)
            args.__dict__.update(dict.fromkeys(FOLDERS))
        try:
            attention_options(args)
        except ValueError as error:
            self.kernel = str(error)
            args.attention_kernel = "auto"

    def named(self, args: Namespace) -> None:
        """Name what `without` took away again."""
        args.__dict__.update(zip(FOLDERS, self._named, strict=True))


def versions() -> Finding:
    """Python, torch and packages, and this project's own files."""
    check_versions()
    here = {"python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        try:
            here[name] = version(name)
        except PackageNotFoundError:
            here[name] = "absent"
    if torch.cuda.is_available():
        here["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    told = ", ".join(f"{name} {value}" for name, value in here.items() if value != "absent")
    return Finding(True, told, here | {"files of megatron_bp": _source()})


def _source() -> str:
    """A digest of the package's files."""
    digest, root = hashlib.sha256(), Path(megatron_bp.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def degrees(argv: list[str], world: int) -> Finding:
    """Everything that has to divide, before anything is refused."""
    _, args, _ = parsed(argv)
    found = divisors(args, world)
    bad = refusal(found)
    return Finding(bad is None, bad or "\n".join(d.told() for d in found))


def arguments_of(argv: list[str], look: Look) -> tuple[Namespace, Finding]:
    """The run's own checks of its command line; its flags have to be the same everywhere.

    Raises:
        ValueError: it is refused.
    """
    flags = join(argv, full_parser())
    try:
        args = checked(argv, look)
    except (AssertionError, NotImplementedError) as error:
        raise ValueError(refusal_of(error)) from error
    look.named(args)
    same = {
        "flags": hashlib.sha256("\0".join(flags).encode()).hexdigest()[:12],
        "ids of the tokenizer": str(args.bdlm_vocabulary),
    }
    missing = [note for note in look.notes if note != lacking(args)]
    if missing:
        return args, Finding(False, "; ".join(missing), same)
    return args, Finding(True, "nothing is refused", same)


def data(args: Namespace) -> Finding:
    """Each data set can be read, its two files agree, and all ranks see the same.

    Raises:
        ValueError, OSError: one cannot.
    """
    if (missing := lacking(args)) is not None:
        raise ValueError(missing)
    same = {}
    for prefix in dict.fromkeys(data_prefixes(args)):
        index, size = read_index(f"{prefix}.idx"), os.path.getsize(f"{prefix}.bin")
        tokens = check_lengths(index, f"{prefix}.bin", size)
        digest = _digest_of_ends(f"{prefix}.idx", f"{prefix}.bin")
        same[prefix] = f"{tokens} tokens (digest {digest})"
        if args.chats and supervised_of(prefix) is not None:
            same[prefix] += f", mask {_digest_of_ends(f'{prefix}.supervised.npy')}"
    told = "\n".join(f"{prefix}: {facts}" for prefix, facts in same.items())
    return Finding(True, told, same)


def _digest_of_ends(*paths: str) -> str:
    return hashlib.sha256(b"".join(_ends(Path(path)) for path in paths)).hexdigest()[:12]


def _ends(path: Path) -> bytes:
    with path.open("rb") as file:
        first = file.read(ENDS)
        file.seek(max(0, path.stat().st_size - ENDS))
        return first + file.read(ENDS)


def starts_from(args: Namespace, look: Look) -> Finding:
    """The checkpoint that the run starts from, if any, is there and whole, and of this model.

    Raises:
        ValueError: it is not there or not whole.
    """
    if look.checkpoint is not None:
        raise ValueError(look.checkpoint)
    found, run = checkpoint(args), new_run(args)
    if run is None or not run.changed or not run.is_checked(args):
        return found
    if run.contradicts:
        text = (
            f"{run.folder} was trained with other values: {run.contradicts}. The run compares its "
            f"logits with the checkpoint's before it trains, and would end there: set them as they "
            f"were, or start all the same with --check-conversion off"
        )
        return replace(found, ok=False, said=text)
    text = f"set otherwise than there: {run.changed}; the run compares logits before it trains"
    return replace(found, said=f"{found.said}\n{text}")


def checkpoint(args: Namespace) -> Finding:
    """The checkpoint's metadata can be read, its files are there and as long as it says.

    Raises:
        ValueError, OSError: it is not.
    """
    step = getattr(args, "ckpt_step", None)
    folder = newest_checkpoint(args.load, step) or newest_checkpoint(
        args.pretrained_checkpoint, step
    )
    if folder is None:
        return Finding(True, "none to start from", {"starts from": "nothing"})
    try:
        metadata: Any = _reader(folder).read_metadata()
    except Exception as error:  # it is a pickle: what a broken one raises is anything
        raise ValueError(
            f"{folder / '.metadata'}: cannot be read ({type(error).__name__}: {error}); {AGAIN}"
        ) from error
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        end = place.offset + place.length
        ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
    for name, end in ends.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise ValueError(f"{folder / name}: {error.strerror}; {AGAIN}") from error
        if size < end:
            raise ValueError(
                f"{folder / name}: {size} bytes, and its metadata needs {end}; {AGAIN}"
            )
    digest = hashlib.sha256((folder / ".metadata").read_bytes()).hexdigest()[:12]
    told = f"{folder}: {len(ends)} files, {len(metadata.state_dict_metadata)} entries"
    return Finding(True, told, {"starts from": f"{folder} (digest {digest})"})


def _reader(folder: Path) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return FileSystemReader(folder)


def saving(args: Namespace, file: SavedFile) -> Finding:
    """Each rank can write where rank 0 saves checkpoints; what it writes is gone again.

    Args:
        args: Megatron's validated arguments.
        file: that rank 0 has written there.

    Raises:
        ValueError: it cannot.
    """
    if not args.save:
        return Finding(True, "nothing is saved (no --save)")
    _, there = nearest(args.save)
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix="preflight-") as own:
            own.write(b"written")
            own.flush()
    except OSError as error:
        raise ValueError(
            f"--save {args.save}: {there} cannot be written ({error.strerror}); choose a folder "
            f"that can, or make room"
        ) from error
    file.check(args)
    return Finding(True, f"{args.save} can be written, and all ranks see the same")


def kernel(args: Namespace, look: Look) -> Finding:
    """The attention kernel is here, and right on this device.

    Raises:
        ValueError, RuntimeError: it is not.
    """
    if args.objective == "ar":
        return Finding(True, "mode ar has Megatron's own attention")
    if look.kernel is not None:
        raise ValueError(look.kernel)
    options = attention_options(args)
    arguments.test_kernel(args, options)
    return Finding(True, f"{options.kernel.name} agrees with a dense softmax")
