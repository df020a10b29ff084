"""Self-conditioning without ranks: coins, sources, the module, refusals and checkpoints without."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import Case, sample_of

from megatron_bp.arguments import self_conditioning as arguments
from megatron_bp.arguments.contract import ContractError
from megatron_bp.arguments.self_conditioning import check_conditioning, conditioning_refusal
from megatron_bp.batch.self_conditioning import local_condition
from megatron_bp.data.document import Document
from megatron_bp.diffusion.objective import Objective
from megatron_bp.diffusion.self_conditioning import conditioned_documents, source_places
from megatron_bp.model.self_conditioning import SelfConditioning
from megatron_bp.sequence.packing import Sample, pack
from megatron_bp.sequence.plan import SequenceOptions, SequencePlan, make_plan
from megatron_bp.tools.verify import gradients

ON = [True, False, True]


def documents(keys: list[int], split: int = 0) -> Sample:
    return pack(
        [Document(np.zeros(3, np.int32), np.ones(3, np.bool_), key) for key in keys],
        3 * len(keys),
        split=split,
    )


def coins(sample: Sample, share: float = 0.5, seed: int = 1) -> list[bool]:
    return conditioned_documents(sample, Objective(9, 10, seed, self_conditioning=share)).tolist()


def test_a_coin_belongs_to_its_document() -> None:
    keys = list(range(400))
    together = coins(documents(keys))
    assert together == [coin for key in keys for coin in coins(documents([key]))]
    assert 150 < sum(together) < 250
    assert together[::-1] == coins(documents(keys[::-1]))
    assert together != coins(documents(keys), seed=2)
    assert together != coins(documents(keys, split=1))
    later = documents(keys)
    later.document_epochs[:] = 1
    assert together != coins(later)


def test_coins_of_a_run_stay_what_they_are() -> None:
    """A change of them is a change of every run."""
    told = "".join("x" if coin else "." for coin in coins(documents(list(range(16)))))
    assert told == ".x..xx...xxx..x."


def test_more_documents_are_conditioned_with_a_larger_share() -> None:
    sample = documents(list(range(100)))
    assert not any(coins(sample, 0.0))
    assert all(coins(sample, 1.0))
    few, many = coins(sample, 0.2), coins(sample, 0.7)
    assert all(b for a, b in zip(few, many, strict=True) if a)


def plan_of(**more: Any) -> SequencePlan:
    """Units of 2, 2, 1 | 2 | 2, 1 rows: documents of 5, 2 and 3 tokens."""
    return make_plan(sample_of(Case((5, 2, 3), 2)), SequenceOptions(2, **more))


@pytest.mark.parametrize(
    ("alignment", "want"),
    [
        ("same", [0, 1, 2, 3, 4, -1, -1, 7, 8, 9]),
        ("next", [-1, 0, -1, 2, -1, -1, -1, 6]),  # the last rows of documents predict nothing
    ],
)
def test_sources_by_hand(alignment: Any, want: list[int]) -> None:
    plan = plan_of(alignment=alignment)
    assert source_places(plan, np.array(ON), alignment).tolist() == want


def test_each_copy_has_its_own_sources() -> None:
    plan = plan_of(copies=2)
    copy = np.repeat(plan.units.copy, plan.units.stop - plan.units.start)
    source = source_places(plan, np.array([True] * 3), "next")
    assert len(source) == 20
    there = source >= 0
    assert there.sum() == 8  # each of four units with two rows, in two copies
    assert np.array_equal(copy[there], copy[source[there]])


def test_rows_of_ranks_by_hand() -> None:
    """BP 2: all units are dealt out, and each conditioned row's source is beside it."""
    plan = plan_of(block_parallel_size=2, context_parallel_size=2)
    source = source_places(plan, np.array(ON), "next")
    seen = []
    for rank in range(2):
        rows = plan.rows_of(rank, multiple=4)
        local = local_condition(source, rows)
        assert local.needed
        assert local.rows.tolist() == [r + 1 for r in local.sources.tolist()]
        place = rows.corrupted[local.rows.numpy() - rows.num_clean]
        assert np.array_equal(source[place], rows.corrupted[local.sources.numpy() - rows.num_clean])
        seen += place.tolist()
    assert sorted(seen) == np.flatnonzero(source >= 0).tolist() == [1, 3, 8]
    nothing = local_condition(np.full(10, -1), plan.rows_of(0))
    assert not nothing.needed
    assert len(nothing.rows) == 0


def module(fresh: bool = False, sequence_parallel: bool = False) -> SelfConditioning:
    torch.manual_seed(2)
    config = Namespace(
        hidden_size=6,
        layernorm_epsilon=1e-5,
        sequence_parallel=sequence_parallel,
        init_method=lambda weight: torch.nn.init.normal_(weight, std=0.5),
    )
    return SelfConditioning(config, 4, fresh=fresh)


def test_a_new_module_changes_nothing() -> None:
    embedded, soft = torch.randn(5, 1, 6), torch.randn(2, 6)
    assert torch.equal(module()(embedded, torch.tensor([1, 4]), soft), embedded)
    assert module().gate.weight.any()


def test_only_the_rows_named_are_conditioned() -> None:
    made, embedded = module(), torch.randn(5, 1, 6)
    torch.nn.init.normal_(made.down.weight)
    got = made(embedded, torch.tensor([1, 4]), torch.randn(2, 6))
    assert torch.equal(got[[0, 2, 3]], embedded[[0, 2, 3]])
    assert not torch.equal(got[[1, 4]], embedded[[1, 4]])


def test_without_a_row_every_parameter_has_a_gradient_of_zero() -> None:
    made = module()
    got = made(torch.randn(5, 1, 6, requires_grad=True), torch.zeros(0).long(), torch.zeros(0, 6))
    got.sum().backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parameters_tell_of_sequence_parallelism(sequence_parallel: bool) -> None:
    marked = {p.sequence_parallel for p in module(sequence_parallel=sequence_parallel).parameters()}
    assert marked == {sequence_parallel}


def test_a_fresh_module_loads_itself_once() -> None:
    made = module(fresh=True)
    outer = torch.nn.ModuleDict({"self_conditioning": made})
    before = {name: value.clone() for name, value in made.state_dict().items()}
    assert made.sharded_state_dict() == {}
    outer.load_state_dict({}, strict=True)
    assert all(torch.equal(before[name], value) for name, value in made.state_dict().items())
    with pytest.raises(RuntimeError, match="Missing key"):  # from then on it is saved and loaded
        outer.load_state_dict({}, strict=True)


def test_a_module_that_was_used_is_never_left_out_of_a_checkpoint() -> None:
    made = module(fresh=True)
    made(torch.randn(2, 1, 6), torch.tensor([1]), torch.randn(1, 6))
    assert not made._fresh


def test_verify_gives_zeros_values_and_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_unwrapped", lambda model: model)
    one, other, told = module(), module(), []
    before = {name: value.clone() for name, value in one.state_dict().items()}
    for made in (one, other):
        gradients.fill_zeros([made], Namespace(reload_model_params=lambda: told.append(1)))
    assert told == [1, 1]
    for name, value in one.state_dict().items():
        assert torch.equal(value, before[name]) == (name != "down.weight"), name
        assert torch.equal(value, other.state_dict()[name]), name
    assert one.down.weight.any()


FINE = {
    "self_conditioning": 0.5,
    "self_conditioning_width": None,
    "pipeline_model_parallel_size": 1,
    "block_parallel_size": 2,
    "context_parallel_size": 2,
    "alignment": "same",
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"self_conditioning": 1.5}, "--self-conditioning 1.5: is a probability"),
        ({"self_conditioning": float("nan")}, "--self-conditioning nan: is a probability"),
        ({"self_conditioning_width": 0}, "--self-conditioning-width 0: must be at least 1"),
        (
            {"self_conditioning": 0.0, "self_conditioning_width": 8},
            "--self-conditioning-width 8 with --self-conditioning 0",
        ),
        ({"pipeline_model_parallel_size": 2}, "with --pipeline-model-parallel-size 2"),
        ({"alignment": "next", "block_parallel_size": 1}, "--alignment next in mode CP"),
    ],
)
def test_refusals_name_value_rule_and_way_out(changes: dict[str, Any], words: str) -> None:
    reason = conditioning_refusal(Namespace(**FINE | changes))
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"alignment": "next"},
        {"block_parallel_size": 1},
        {"self_conditioning": 0.0, "pipeline_model_parallel_size": 2},
        {"self_conditioning_width": 8},
    ],
)
def test_what_is_not_refused(changes: dict[str, Any]) -> None:
    assert conditioning_refusal(Namespace(**FINE | changes)) is None


def started(load: Path | None, **changes: Any) -> Namespace:
    usual = {
        "self_conditioning": 0.5,
        "self_conditioning_width": None,
        "hidden_size": 32,
        "load": None if load is None else str(load),
        "pretrained_checkpoint": None,
        "finetune": False,
        "rank": 0,
    }
    return Namespace(**usual | changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    return tmp_path


def saved(monkeypatch: pytest.MonkeyPatch, **had: Any) -> None:
    monkeypatch.setattr(arguments, "saved_arguments", lambda folder: Namespace(**had))


@pytest.mark.parametrize("had", [{}, {"self_conditioning": 0.0, "self_conditioning_width": None}])
def test_a_new_run_from_a_checkpoint_without_the_module_says_so(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    had: dict[str, Any],
) -> None:
    saved(monkeypatch, **had)
    for args in (
        started(folder, finetune=True),
        started(None, pretrained_checkpoint=str(folder), self_conditioning_width=7),
    ):
        check_conditioning(args)
        assert args.bdlm_fresh_conditioning
        told = f"has no self-conditioning: a new module of {args.self_conditioning_width} hidden"
        assert told in capsys.readouterr().out
    with pytest.raises(ContractError, match="was trained without self-conditioning"):
        check_conditioning(started(folder))


def test_a_checkpoint_with_the_module_needs_its_width(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    saved(monkeypatch, self_conditioning=0.5, self_conditioning_width=32)
    for finetune in (False, True):
        args = started(folder, finetune=finetune)
        check_conditioning(args)
        assert not args.bdlm_fresh_conditioning
        assert args.self_conditioning_width == 32
    with pytest.raises(ValueError, match="has 32 hidden units; give that width"):
        check_conditioning(started(folder, finetune=True, self_conditioning_width=8))


def test_without_self_conditioning_there_is_no_width(folder: Path) -> None:
    args = started(folder, self_conditioning=0.0)
    check_conditioning(args)
    assert args.self_conditioning_width is None
    fresh = started(None)
    check_conditioning(fresh)
    assert (fresh.self_conditioning_width, fresh.bdlm_fresh_conditioning) == (32, False)
