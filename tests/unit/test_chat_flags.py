"""The flags of chats: what is refused at the start, and what becomes of them."""

import argparse
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chat_files import random_chats, write_chats
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from megatron_bp.arguments import chats as of_chats
from megatron_bp.arguments import contract
from megatron_bp.arguments.chats import add_chat_flags, chat_policy, check_chats, refuse_chats
from megatron_bp.arguments.refused import RefusedError
from megatron_bp.data.answers import ChatPolicy
from megatron_bp.data.indexed import DataError
from megatron_bp.data.supervised import supervised_of
from megatron_bp.tools.prepare import Options, prepare
from megatron_bp.tools.verify.sample_data import with_sample_data


def arguments(*flags: str, **more: Any) -> Namespace:
    parser = argparse.ArgumentParser()
    add_chat_flags(parser)
    values = {
        "response_end": "cut",
        "bdlm_seq_length": 40,
        "diffusion_block_size": 4,
        "block_grid": "document",
    }
    return Namespace(**vars(parser.parse_args(flags)), **values, bdlm_vocabulary=258, **more)


def text(folder: Path) -> str:
    """A data set of texts."""
    (folder / "a.txt").write_text("some text")
    prepare(Options([folder / "a.txt"], folder / "text"))
    return str(folder / "text")


@pytest.mark.parametrize("at_once", [1, 12, 1 << 22])
def test_a_response_that_shares_a_block_with_a_prompt_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """The third chat's first response ends at token 6 of blocks of 4; all others are sound."""
    monkeypatch.setattr(of_chats, "TOKENS_AT_ONCE", at_once)
    marks = ["..xxxxxx..x", "....xxx", "..xxxx..x", "xx.."]
    chats = [([1] * len(m), [int(c == "x") for c in m]) for m in marks]
    prefix = write_chats(tmp_path / "chats", chats)
    flags = {"response_end": "refuse"}
    with pytest.raises(RefusedError, match=r"in chat 2 of .*chats a response ends at token 6, in"):
        check_chats(Namespace(**vars(arguments("--chats")) | flags), prefix)
    check_chats(arguments("--chats"), prefix)
    check_chats(
        Namespace(**vars(arguments("--chats")) | flags),
        write_chats(tmp_path / "sound", chats[:2] + chats[3:]),
    )


@pytest.mark.parametrize(
    ("marks", "how", "refused"),
    [
        # Blocks of 4, rows of 12.
        ("..xx..xx.", "truncate", None),  # sound: responses end at 4 and 8
        ("..xxx.......x", "truncate", None),  # the response that makes the rest a prompt is cut off
        ("..xxx......xx", "truncate", "in chat 1 .* at token 5,"),  # one token of it stays
        ("..xxx.......x", "drop", None),
        ("..xxx..x.....", "drop", None),  # its first 12 alone would be refused
        ("..xxx..x.....", "truncate", "in chat 1 .* at token 5,"),
        ("..xxx......x", "drop", "in chat 1 .* at token 5,"),  # as long as a row: not dropped
    ],
)
@pytest.mark.parametrize("at_once", [1, 1 << 22])
def test_responses_that_are_not_trained_on_are_not_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at_once: int,
    marks: str,
    how: str,
    refused: str | None,
) -> None:
    monkeypatch.setattr(of_chats, "TOKENS_AT_ONCE", at_once)
    chats = [([1] * len(m), [int(c == "x") for c in m]) for m in ("..xxxxxx..x", marks, "xxxx.x")]
    prefix = write_chats(tmp_path / "chats", chats)
    flags = {"response_end": "refuse", "bdlm_seq_length": 12}
    args = Namespace(**vars(arguments("--chats", "--overlong-chats", how)) | flags)
    if refused is None:
        check_chats(args, prefix)
    else:
        with pytest.raises(RefusedError, match=refused):
            check_chats(args, prefix)


# --- the kind of data ----------------------------------------------------------------------------


def test_chats_need_the_flag_and_texts_must_not_have_it(tmp_path: Path) -> None:
    chats, texts = write_chats(tmp_path / "chats", random_chats(5)), text(tmp_path)
    refuse_chats(arguments("--chats"), [chats], ["--chats"])
    refuse_chats(arguments(), [texts], [])
    for prefixes in ([chats], [texts, chats]):
        with pytest.raises(RefusedError, match=r"chats: is a data set of chats .* add --chats"):
            refuse_chats(arguments(), prefixes, [])
    with pytest.raises(RefusedError, match=r"--chats: .*text has no .* leave --chats out"):
        refuse_chats(arguments("--chats"), [chats, texts], ["--chats"])


def test_chats_whose_mask_is_gone_are_refused(tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats", random_chats(5))
    Path(f"{chats}.supervised.npy").unlink()
    for flags in ([], ["--chats"]):
        with pytest.raises(DataError, match=r"supervised.npy: is missing"):
            refuse_chats(arguments(*flags), [chats], flags)


@pytest.mark.parametrize(
    "flags", [["--overlong-chats", "drop"], ["--answer-fill", "eos"], ["--print-samples", "2"]]
)
def test_flags_of_chats_alone(flags: list[str]) -> None:
    with pytest.raises(RefusedError, match=f"{flags[0]}: of chats alone; add --chats"):
        refuse_chats(arguments(*flags), [], flags[:1])
    refuse_chats(arguments("--chats", *flags), [], flags[:1])


# --- once the tokenizer is there -----------------------------------------------------------------


def test_an_overlong_chat_is_found_at_the_start(tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats", [([1] * 9, [1] * 9), ([1] * 41, [1] * 41)])
    with pytest.raises(DataError, match=r"chats: chat 1 has 41 tokens, and a row 40 .*truncate or"):
        check_chats(arguments("--chats"), chats)
    for how in ("truncate", "drop"):
        check_chats(arguments("--chats", "--overlong-chats", how), chats)


def test_a_chat_of_two_sequences_is_refused(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "p.bin"), np.uint16)
    builder.add_document(np.arange(5, dtype=np.uint16), [2, 3])
    builder.finalize(str(tmp_path / "p.idx"))
    with pytest.raises(RefusedError, match="2 sequences in 1 documents"):
        check_chats(arguments("--chats"), str(tmp_path / "p"))


class NoEod:
    """A tokenizer that, as some of Megatron's, raises where it has no such id."""

    @property
    def eod(self) -> int:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("tokenizer", "wanted"),
    [
        (SimpleNamespace(eod=256, eos=5), 256),
        (SimpleNamespace(eod=None, eos=5), 5),
        (SimpleNamespace(eod=-1, eos=5), 5),
        (SimpleNamespace(eod=0), 0),
        (SimpleNamespace(eod=258, eos=258), None),
        (SimpleNamespace(), None),
        (NoEod(), None),
    ],
)
def test_the_id_that_answers_are_filled_with(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any, wanted: int | None
) -> None:
    monkeypatch.setattr("megatron.training.get_tokenizer", lambda: tokenizer)
    args = arguments("--chats", "--answer-fill", "eos")
    if wanted is None:
        with pytest.raises(RefusedError, match="--answer-fill eos: the tokenizer has no end-of"):
            chat_policy(args)
    else:
        assert chat_policy(args).fill == wanted
    assert chat_policy(arguments("--chats")).fill is None


def test_the_policy_is_that_of_the_flags() -> None:
    args = arguments("--chats", "--overlong-chats", "drop")
    args.block_grid = "response"
    assert chat_policy(args, 7) == ChatPolicy(40, 4, "response", "drop", None, 7)


def test_flags_of_chats_are_listed() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_chat_flags(parser)
    names = {action.option_strings[0] for action in parser._actions}
    assert names == {"--chats", *of_chats.OF_CHATS}


# --- the contract --------------------------------------------------------------------------------


def test_another_global_batch_is_told_of_chats_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "iter_0000006").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6\n")
    monkeypatch.setattr(contract, "saved_arguments", lambda folder: Namespace(global_batch_size=4))
    common = {"load": str(tmp_path), "pretrained_checkpoint": None, "finetune": False, "rank": 0}
    for chats, skip_train, told in (
        (True, False, True),
        (False, False, False),
        (True, True, False),
    ):
        args = Namespace(global_batch_size=8, chats=chats, skip_train=skip_train, **common)
        contract.check_contract(args)
        assert ("--global-batch-size was 4, is 8" in capsys.readouterr().out) == told


# --- verify --------------------------------------------------------------------------------------


def test_tiny_chats_are_made_for_a_config_of_chats(tmp_path: Path) -> None:
    values = {"vocab_size": 258, "chats": True, "data_path": ["missing"]}
    (prefix,) = with_sample_data(values, tmp_path)["data_path"]
    data, mask = IndexedDataset(prefix), supervised_of(prefix)
    assert mask is not None
    sizes = data.sequence_lengths
    assert len(sizes) > 50
    assert 6 <= sizes.min() < 10
    assert 35 < sizes.max() <= 40
    twelve = int(np.flatnonzero(sizes == 12)[0])
    got = mask.of(int(sizes[:twelve].sum()), 12)
    assert got.tolist() == [False] * 4 + [True] * 4 + [False] * 2 + [True] * 2
    refuse_chats(arguments("--chats"), [prefix], ["--chats"])
