"""What a new run takes from a checkpoint's saved arguments, and what it refuses."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_bp.arguments import from_checkpoint as module
from megatron_bp.arguments.from_checkpoint import NewRun, NewRunError, new_run

SAVED = {
    "objective": "ar",
    "bdlm_vocabulary": 257,
    "padded_vocab_size": 384,
    "num_layers": 2,
    "rotary_base": 10000,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 257,
}
ARGS = {
    **SAVED,
    "load": None,
    "ckpt_step": None,
    "pretrained_checkpoint": "somewhere",
    "finetune": False,
    "objective": "block_diffusion",
    "bdlm_vocabulary": 258,
    "vocab_size": 258,
    "pretrained_vocabulary": None,
    "added_embeddings": "mean",
    "group_query_attention": False,
    "make_vocab_size_divisible_by": 128,
    "tensor_model_parallel_size": 2,
    "context_parallel_size": 4,
    "sequence_parallel": True,
}


def start(
    monkeypatch: pytest.MonkeyPatch, saved: dict[str, Any], there: str = "somewhere", **args: Any
) -> NewRun | None:
    folder = Path("iter_0000001")
    monkeypatch.setattr(module, "newest_checkpoint", lambda s, step: folder if s == there else None)
    monkeypatch.setattr(module, "saved_arguments", lambda folder: Namespace(**saved))
    return new_run(Namespace(**ARGS | args))


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in SAVED.items() if name not in names}


def test_the_vocabulary_comes_from_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(monkeypatch, SAVED)
    assert run is not None
    assert (run.ids.old, run.ids.new, run.ids.added) == (257, 258, "mean")
    assert run.converts
    assert run.changed == ""


def test_the_reference_computes_as_the_checkpoint_says_on_one_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = start(monkeypatch, SAVED, rotary_base=500)
    assert run is not None
    assert "--rotary-base was 10000, is 500" in run.changed
    assert run.contradicts == "", "without rotary positions their base does nothing"
    told = run.trained_with
    assert told.rotary_base == 10000
    assert told.objective == "ar"
    assert (told.context_parallel_size, told.sequence_parallel) == (1, False)
    assert told.padded_vocab_size == 512  # of 257 ids, to 128 x TP of this run


def test_what_no_check_of_a_conversion_passes_with(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = SAVED | {
        "position_embedding_type": "rope",
        "layernorm_epsilon": 1e-5,
        "moe_router_topk": 2,
        "moe_aux_loss_coeff": 0.0,
    }
    same = {name: saved[name] for name in saved.keys() - SAVED.keys()}
    other = same | {"layernorm_epsilon": 1e-6, "moe_router_topk": 4, "moe_aux_loss_coeff": 0.1}
    run = start(monkeypatch, saved, **(other | {"rotary_base": 500}))
    assert run is not None
    assert run.contradicts == "--rotary-base was 10000, is 500"
    assert all(f"--{flag} was" in run.changed for flag in ("norm-epsilon", "moe-router-topk"))
    run = start(monkeypatch, saved | {"num_experts": 4}, num_experts=4, **other)
    assert run is not None
    assert run.contradicts == "--moe-router-topk was 2, is 4"


@pytest.mark.parametrize(
    ("saved", "args", "checked"),
    [
        ({}, {}, True),
        ({}, {"check_conversion": "off"}, False),
        ({}, {"skip_train": True}, False),
        ({"objective": "block_diffusion"}, {}, False),
    ],
)
def test_which_runs_compare_logits(
    monkeypatch: pytest.MonkeyPatch, saved: dict[str, Any], args: dict[str, Any], checked: bool
) -> None:
    run = start(monkeypatch, SAVED | saved)
    assert run is not None
    flags = {"check_conversion": "auto", "skip_train": False}
    assert run.is_checked(Namespace(**flags | args)) == checked


@pytest.mark.parametrize(
    ("there", "args"),
    [
        ("nowhere", {}),
        ("run", {"load": "run"}),  # goes on
    ],
)
def test_no_new_run(monkeypatch: pytest.MonkeyPatch, there: str, args: dict[str, Any]) -> None:
    assert start(monkeypatch, SAVED, there, **args) is None


def test_a_new_run_from_load(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(monkeypatch, SAVED, "run", load="run", finetune=True) is not None


@pytest.mark.parametrize(
    ("saved", "args", "converts"),
    [
        (SAVED, {}, True),
        (without("objective"), {}, True),  # Megatron's own
        (SAVED | {"objective": "block_diffusion"}, {}, False),
        (SAVED, {"objective": "ar"}, False),
    ],
)
def test_what_is_a_conversion(
    monkeypatch: pytest.MonkeyPatch, saved: dict[str, Any], args: dict[str, Any], converts: bool
) -> None:
    run = start(monkeypatch, saved, **args)
    assert run is not None
    assert run.converts == converts


def test_a_checkpoint_of_another_project(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = without("objective", "bdlm_vocabulary")
    with pytest.raises(NewRunError, match="give --pretrained-vocabulary"):
        start(monkeypatch, stock)
    run = start(monkeypatch, stock, pretrained_vocabulary=250)
    assert run is not None
    assert run.ids.old == 250
    same = start(monkeypatch, stock, vocab_size=257, bdlm_vocabulary=257)
    assert same is not None
    assert (same.ids.old, same.ids.new) == (257, 257)  # the same tokenizer: a reserved id


@pytest.mark.parametrize(
    ("saved", "args", "words"),
    [
        (SAVED, {"bdlm_vocabulary": 256}, "257 ids and the tokenizer 256: ids cannot be taken"),
        (SAVED, {"pretrained_vocabulary": 256}, "says that it has 257 true ids"),
        (without("bdlm_vocabulary"), {"pretrained_vocabulary": 385}, "at most the 384 rows"),
        (without("bdlm_vocabulary"), {"pretrained_vocabulary": 0}, "must be at least 1"),
        (SAVED, {"num_layers": 3}, "another model: --num-layers was 2, is 3"),
        (SAVED, {"load_main_params_from_ckpt": True}, "would overwrite the rows of added ids"),
        ({}, {}, "does not tell how many true ids"),
        ({}, {"load": "somewhere"}, "was not trained by this project, so there is no run to go on"),
    ],
)
def test_refusals(
    monkeypatch: pytest.MonkeyPatch, saved: dict[str, Any], args: dict[str, Any], words: str
) -> None:
    with pytest.raises(NewRunError, match=words):
        start(monkeypatch, saved, **args)
