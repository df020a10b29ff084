"""Text and chats to Megatron's .bin and .idx: source trees, plain text, JSON lines.

One file is one document, or one line, paragraph or JSON line is. The order of the documents is
shuffled by the seed and where they stand, so that Megatron's split by position is a fair one, and a
smaller --max-bytes takes a prefix of a larger one. Knows nothing of blocks, noise or models.

    options      what the command line sets        table       which documents stay, in what order
    inputs       which files are read              writing     final names: all files or none
    reading      files to raw documents            report      what P.json says
    tokenizing   text to ids                       run         the steps
    outcome      pieces and reasons                command     the command line
    texts        raw documents to pieces           objects     bytes to text and JSON
    chats/       chats to pieces                   workers     encoding in several processes
    encoding     batches of them to arrays
"""

from megatron_bp.tools.prepare.command import main, parse
from megatron_bp.tools.prepare.inputs import Found, shuffled, walk
from megatron_bp.tools.prepare.options import Options
from megatron_bp.tools.prepare.report import Tally, entropy
from megatron_bp.tools.prepare.run import prepare
from megatron_bp.tools.prepare.tokenizing import BYTE_VOCABULARY, EOD_ID, MASK_ID
from megatron_bp.tools.prepare.writing import ALL_ENDINGS, ENDINGS

__all__ = [
    "ALL_ENDINGS",
    "BYTE_VOCABULARY",
    "ENDINGS",
    "EOD_ID",
    "MASK_ID",
    "Found",
    "Options",
    "Tally",
    "entropy",
    "main",
    "parse",
    "prepare",
    "shuffled",
    "walk",
]
