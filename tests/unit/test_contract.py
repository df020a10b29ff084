"""What a run that goes on from a checkpoint must agree with; real checkpoints are in tests/e2e."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from megatron.training.argument_utils import _apply_yarn_config_from_args

from megatron_bp.arguments import contract
from megatron_bp.arguments.contract import (
    FIELDS,
    MODEL,
    UNSET,
    ContractError,
    check_contract,
    differences,
)

# Each field as it was saved, and a value that differs.
VALUES: dict[str, tuple[Any, Any]] = {
    "objective": ("block_diffusion", "other"),
    "diffusion_block_size": (32, 16),
    "mask_token_id": (257, 258),
    "bdlm_vocabulary": (258, 259),
    "noise": ("absorbing", "uniform"),
    "noise_per": ("block", "document"),
    "noise_schedule": ("linear", "cosine"),
    "noise_interval": ([1e-3, 1.0], [0.0, 1.0]),
    "antithetic": (False, True),
    "loss_weighting": ("bound", "one"),
    "diffusion_loss_weight": (1.0, 0.3),
    "ar_loss_weight": (0.0, 1.0),
    "ar_scored_tokens": ("supervised", "all"),
    "block_grid": ("document", "response"),
    "response_end": ("cut", "refuse"),
    "corrupted_copies": (1, 2),
    "complementary_copies": (False, True),
    "never_corrupt_ids": ([], [3]),
    "alignment": ("same", "next"),
    "scored_tokens": ("corrupted", "all"),
    "loss_count": ("supervised", "joint"),
    "exclude_mask_logit": (False, True),
    "self_conditioning": (0.0, 0.5),
    "window_anchor": ("row", "block"),
    "answer_fill": ("none", "eos"),
    "clean_relation": ("block", "token"),
    "own_relation": ("bidirectional", "causal"),
    "untie_embeddings_and_output_weights": (False, True),
    "self_conditioning_width": (32, 16),
    **dict.fromkeys(MODEL, (1, 2)),
}
OTHER = {"load": None, "pretrained_checkpoint": None, "finetune": False, "rank": 0}


def arguments(**changes: Any) -> Namespace:
    return Namespace(**{name: old for name, (old, _) in VALUES.items()} | OTHER | changes)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with checkpoints of steps 3 and 6, both saved with VALUES."""
    for step in (3, 6):
        (tmp_path / f"iter_{step:07d}").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6\n")
    monkeypatch.setattr(contract, "saved_arguments", lambda folder: arguments())
    return str(tmp_path)


def test_there_is_a_case_for_each_field() -> None:
    assert set(VALUES) == set(FIELDS)
    assert differences(arguments(), arguments()) == []


@pytest.mark.parametrize("name", FIELDS)
def test_a_difference_names_the_field_the_saved_value_and_the_new(
    checkpoint: str, name: str
) -> None:
    old, new = VALUES[name]
    changed = arguments(load=checkpoint, **{name: new})
    assert differences(arguments(), changed) == [(name, old, new)]
    with pytest.raises(ContractError) as caught:
        check_contract(changed)
    message = str(caught.value)
    others = {
        "bdlm_vocabulary": "the tokenizer's vocabulary",
        "layernorm_epsilon": "--norm-epsilon",
    }
    shown = others.get(name, f"--{name.replace('_', '-')}")
    assert f"{shown} was {old}, is {new}." in message
    assert f"{checkpoint}/iter_0000006 was trained with" in message
    assert "--finetune" in message


def test_all_differences_are_told_at_once(checkpoint: str) -> None:
    with pytest.raises(ContractError) as caught:
        check_contract(arguments(load=checkpoint, noise="uniform", antithetic=True))
    assert "--noise was absorbing, is uniform; --antithetic was False, is True." in str(
        caught.value
    )


def test_the_same_contract_goes_on(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_contract(arguments(load=checkpoint, lr=5.0))
    check_contract(arguments(load=checkpoint, noise_interval=(1e-3, 1.0)))  # a tuple is no change
    assert capsys.readouterr().out == ""


def test_a_field_that_an_older_checkpoint_does_not_know_is_no_difference() -> None:
    saved = arguments()
    del saved.antithetic
    assert differences(saved, arguments(antithetic=True)) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_fine_tuning_prints_the_differences_once(
    checkpoint: str, rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    check_contract(arguments(load=checkpoint, finetune=True, noise="uniform", rank=rank))
    told = capsys.readouterr().out
    if rank:
        assert told == ""
    else:
        assert "a new run from" in told
        assert told.endswith("--noise was absorbing, is uniform\n")


def test_a_pretrained_checkpoint_begins_a_new_contract(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_contract(arguments(pretrained_checkpoint=checkpoint, mask_token_id=5))
    assert "--mask-token-id was 257, is 5" in capsys.readouterr().out


def test_a_pretrained_checkpoint_beside_an_empty_load_folder_is_told(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Megatron does it: no checkpoint in --load yet, so it starts from the other."""
    changed = arguments(
        load=str(tmp_path / "new"), pretrained_checkpoint=checkpoint, noise="uniform"
    )
    check_contract(changed)
    assert "--noise was absorbing, is uniform" in capsys.readouterr().out


@pytest.mark.parametrize(
    "source", [{}, {"load": "nowhere"}, {"pretrained_checkpoint": "nowhere"}], ids=str
)
def test_without_a_checkpoint_yet_anything_goes(source: dict[str, str], tmp_path: Path) -> None:
    source = {name: str(tmp_path / folder) for name, folder in source.items()}
    check_contract(arguments(noise="uniform", **source))


def test_a_tracker_without_its_folder_is_left_to_megatron(checkpoint: str) -> None:
    Path(checkpoint, "latest_checkpointed_iteration.txt").write_text("9")
    check_contract(arguments(load=checkpoint, noise="uniform"))


@pytest.mark.parametrize(
    ("tracker", "step", "folder"),
    [("6\n", None, "iter_0000006"), ("6", 3, "iter_0000003"), ("release", None, "release")],
)
def test_the_checkpoint_that_megatron_would_load_is_read(
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    tracker: str,
    step: int | None,
    folder: str,
) -> None:
    read: list[Path] = []
    monkeypatch.setattr(
        contract, "saved_arguments", lambda folder: read.append(folder) or arguments()
    )
    Path(checkpoint, "release").mkdir()
    Path(checkpoint, "latest_checkpointed_iteration.txt").write_text(tracker)
    check_contract(arguments(load=checkpoint, ckpt_step=step))
    assert read == [Path(checkpoint, folder)]


@pytest.mark.parametrize(("name", "flag"), [("seed", "seed"), ("bdlm_seq_length", "seq-length")])
def test_what_may_change_on_the_way_is_told(
    checkpoint: str,
    name: str,
    flag: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(contract, "saved_arguments", lambda folder: arguments(**{name: 1}))
    check_contract(arguments(load=checkpoint, **{name: 2}))
    assert f"--{flag} was 1, is 2: the data, their order, noise" in capsys.readouterr().out
    check_contract(arguments(load=checkpoint, **{name: 1}))
    assert capsys.readouterr().out == ""


def test_without_groups_there_is_a_key_head_for_each_query_head() -> None:
    """Megatron itself sets the number of groups on the way, whose default is 1."""
    same = {"group_query_attention": False, "num_attention_heads": 4}
    assert (
        differences(Namespace(num_query_groups=4, **same), Namespace(num_query_groups=1, **same))
        == []
    )
    other = Namespace(group_query_attention=True, num_attention_heads=4, num_query_groups=2)
    assert differences(Namespace(num_query_groups=1, **same), other) == [("num_query_groups", 4, 2)]


def test_what_is_not_given_is_megatrons_default() -> None:
    """None in its arguments stands for the value that its model is built with."""
    given = Namespace(position_embedding_type="yarn", rotary_scaling_factor=2.0)
    given.mscale = given.mscale_all_dim = 1.0
    built = Namespace()
    _apply_yarn_config_from_args(built, Namespace(**vars(given) | dict.fromkeys(UNSET)))
    assert {name: getattr(built, name) for name in UNSET} == UNSET
    for name, value in UNSET.items():
        unset = Namespace(**{name: None})
        assert differences(Namespace(**{name: value}), unset) == []
        assert differences(unset, Namespace(**{name: value})) == []
        assert differences(Namespace(**{name: 0}), unset) == [(name, 0, value)]
