"""What cannot be written, such as to a disk that is full, in one line."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from megatron_bp.tools.convert.refused import ConvertError

TORCHS = ("inline_container", "PytorchStreamWriter")  # in RuntimeErrors of torch.save's writer


@contextlib.contextmanager
def writing(target: Path, left: str) -> Iterator[None]:
    """While `target` is written; what is in it stays there.

    Args:
        target: a folder.
        left: what it holds if this fails, and what is to be done with that.

    Raises:
        ConvertError: for whatever the writers raise where a file cannot be written.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        cause = _cause(error)
        if isinstance(cause, ConvertError):
            raise ConvertError(f"{cause}. {left}") from error
        if not _of_a_file(cause):
            raise cause from None
        told = " ".join(str(cause).split())
        free = shutil.disk_usage(target).free / 1e9
        raise ConvertError(
            f"{target}: cannot be written ({told}); {free:.3g} GB are free there. {left}, and try "
            f"again where there is room"
        ) from error


def _cause(error: BaseException) -> BaseException:
    """What a writer raised, without torch's wrapping, which is of no Exception."""
    while isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return error


def _of_a_file(error: BaseException) -> bool:
    writers = isinstance(error, RuntimeError) and any(word in str(error) for word in TORCHS)
    return writers or isinstance(error, OSError | SafetensorError)
