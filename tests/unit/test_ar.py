"""Mode "ar": labels and masks of packed documents by hand, packed sequences, refusals."""

from argparse import Namespace

import numpy as np
import pytest
import torch
from ranks import run_ranks

from megatron_bp.data.document import Document
from megatron_bp.sequence.packing import Sample, pack


def row(*supervised: str, length: int = 9) -> Sample:
    """Documents of tokens 10, 11, ..., one for each word; "x" is supervised."""
    documents, first = [], 10
    for number, word in enumerate(supervised):
        tokens = np.arange(first, first + len(word), dtype=np.int32)
        documents.append(Document(tokens, np.array([c == "x" for c in word]), number))
        first += len(word)
    return pack(documents, length)


def test_labels_by_hand() -> None:
    from megatron_bp.training.ar import make_batch

    # Tokens 10 11 12 | 13 | 14 15 16 17, padding; 15 and 16 are not supervised.
    batch = make_batch([row("xxx", "x", "x..x")])
    assert batch.tokens.tolist() == [[10, 11, 12, 13, 14, 15, 16, 17, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3, 0]]
    # 10 -> 11 and 11 -> 12; 16 -> 17; 12, 13 and 17 are their documents' last.
    assert batch.labels.tolist() == [[11, 12, 0, 0, 0, 0, 17, 0, 0]]
    assert batch.scored.int().tolist() == [[1, 1, 0, 0, 0, 0, 1, 0, 0]]
    assert batch.count == 3


def test_rows_of_other_lengths_and_a_multiple() -> None:
    from megatron_bp.training.ar import make_batch

    batch = make_batch([row("xx", length=2), row("xxx", length=5)], multiple=4)
    assert batch.tokens.tolist() == [[10, 11, 0, 0, 0, 0, 0, 0], [10, 11, 12, 0, 0, 0, 0, 0]]
    assert batch.document.tolist() == [[0, 0, *[-1] * 6], [0, 0, 0, *[-1] * 5]]
    assert batch.count == 1 + 2


def test_mask_by_hand() -> None:
    from megatron_bp.training.ar import document_mask

    hidden = document_mask(torch.tensor([[0, 0, 1, 1, -1, -1]]))
    sees = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],  # padding: itself alone, so that no row is empty
        [0, 0, 0, 0, 0, 1],
    ]
    assert (~hidden).int().tolist() == [[sees]]


def test_packed_sequences_by_hand() -> None:
    from megatron_bp.training.ar import packed_documents

    packed = packed_documents(torch.tensor([[0, 0, 0, 1, 2, 2, -1, -1]]))
    assert packed.cu_seqlens_q.tolist() == [0, 3, 4, 6, 7, 8]
    assert packed.max_seqlen_q == 3
    assert packed.qkv_format == "thd"


def refusal(rank: int, world: int, flags: list[str]) -> str:
    from megatron_bp.arguments.ar import refuse_ar
    from megatron_bp.arguments.flags import full_parser
    from megatron_bp.arguments.refused import RefusedError

    args = full_parser().parse_args(["--objective", "ar", "--transformer-impl", "local", *flags])
    args.context_parallel_size = max(args.context_parallel_size, args.block_parallel_size)
    assert isinstance(args, Namespace)
    try:
        refuse_ar(args, {flag for flag in flags if flag.startswith("--")})
    except RefusedError as error:
        return str(error)
    return ""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", ""),
        ("--tensor-model-parallel-size 2 --micro-batch-size 2", ""),
        ("--block-parallel-size 2", "--block-parallel-size 2 with --objective ar"),
        ("--context-parallel-size 2", "--context-parallel-size 2 with --objective ar"),
        ("--mask-token-id 7", "--mask-token-id with --objective ar"),
        ("--noise uniform --antithetic", "--antithetic, --noise with --objective ar"),
        ("--diffusion-block-size 4", "there are no corrupted rows"),
        ("--max-imbalance 1.1", "--max-imbalance with --objective ar"),
        ("--eval-draws 2", "--eval-draws with --objective ar"),
        ("--chats --answer-fill eos", "--answer-fill with --objective ar"),
        ("--attention-kernel tiled", "--attention-kernel with"),
        ("--window-size 5,0", "a window in the place of the documents' mask"),
        ("--sequence-parallel --tensor-model-parallel-size 2", "norms of Megatron's local layers"),
        ("--sequence-parallel --transformer-impl transformer_engine", ""),
    ],
)
def test_refusals(flags: str, words: str) -> None:
    (told,) = run_ranks(1, refusal, flags.split())
    assert words in told
    assert bool(words) == bool(told)
