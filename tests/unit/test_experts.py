"""Flags of a mixture of experts: what is refused, by name and with the way out; what is derived."""

from argparse import Namespace

import pytest

from megatron_bp.arguments.build import auxiliary, moe_layers
from megatron_bp.arguments.experts import experts_refusal
from megatron_bp.arguments.flags import full_parser
from megatron_bp.arguments.parse import DEFAULTS
from megatron_bp.diffusion.loss import row_scale

FOUR = "--num-experts 4 --moe-token-dispatcher-type alltoall"


def parsed(flags: str) -> Namespace:
    return full_parser().parse_args(flags.split())


@pytest.mark.parametrize(
    "flags",
    [
        "",
        FOUR,
        f"{FOUR} --expert-model-parallel-size 4 --moe-aux-loss-coeff 0.01",
        f"{FOUR} --moe-router-load-balancing-type seq_aux_loss --moe-z-loss-coeff 0.001",
        f"{FOUR} --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1 2",
        f"{FOUR} --moe-router-load-balancing-type none",
        f"{FOUR} --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        f"{FOUR} --moe-shared-expert-intermediate-size 8 --moe-layer-freq [0,1]",
        f"{FOUR} --tensor-model-parallel-size 2 --sequence-parallel",
        f"{FOUR} --moe-router-topk 1 --moe-router-pre-softmax",
        f"{FOUR} --moe-router-num-groups 2 --moe-router-group-topk 1",
        "--num-experts 4 --moe-token-dispatcher-type allgather",
    ],
)
def test_what_works_is_not_refused(flags: str) -> None:
    assert experts_refusal(parsed(flags)) is None


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--expert-model-parallel-size 2", "2 without --num-experts"),
        ("--moe-aux-loss-coeff 0.01", "--moe-aux-loss-coeff 0.01 without --num-experts"),
        ("--moe-z-loss-coeff 0.01", "--moe-z-loss-coeff 0.01 without --num-experts"),
        ("--num-experts -1", "--num-experts -1: must be at least 1"),
        (f"{FOUR} --expert-model-parallel-size 3", "3: every rank holds as many experts"),
        (f"{FOUR} --moe-router-topk 5", "--moe-router-topk 5: must be at least 1 and at most"),
        (f"{FOUR} --moe-router-topk 0", "--moe-router-topk 0"),
        (f"{FOUR} --moe-router-topk 1", "add --moe-router-pre-softmax"),
        (f"{FOUR} --expert-tensor-parallel-size 2", "--expert-tensor-parallel-size 2"),
        (f"{FOUR} --tensor-model-parallel-size 2", "add --sequence-parallel"),
        (f"{FOUR} --moe-token-dispatcher-type flex", "flex: DeepEP"),
        (
            "--num-experts 4 --moe-token-dispatcher-type allgather --expert-model-parallel-size 2",
            "gathers equally many rows",
        ),
        (f"{FOUR} --moe-enable-deepep", "--moe-enable-deepep: DeepEP needs GPUs"),
        (f"{FOUR} --moe-expert-capacity-factor 1.5", "--moe-expert-capacity-factor 1.5: drops"),
        (f"{FOUR} --moe-input-jitter-eps 0.1", "--moe-input-jitter-eps 0.1: the ranks"),
        (f"{FOUR} --moe-grouped-gemm", "expert after expert; this needs Transformer Engine"),
        (f"{FOUR} --moe-permute-fusion", "--moe-permute-fusion: needs Transformer Engine"),
        (f"{FOUR} --moe-router-fusion", "--moe-router-fusion: needs Transformer Engine"),
        (f"{FOUR} --moe-shared-expert-overlap", "CUDA streams"),
        (f"{FOUR} --overlap-moe-expert-parallel-comm", "fixes row counts"),
        (f"{FOUR} --moe-use-upcycling", "--moe-use-upcycling"),
        (f"{FOUR} --moe-router-force-load-balancing", "routes at random"),
        (f"{FOUR} --moe-router-load-balancing-type global_aux_loss", "computed so far"),
        (f"{FOUR} --moe-router-load-balancing-type sinkhorn", "this rank's rows"),
        (f"{FOUR} --moe-router-load-balancing-type quantile_balancing", "equally many rows"),
        (f"{FOUR} --moe-router-load-balancing-type none --moe-aux-loss-coeff 1", "no effect"),
        (f"{FOUR} --moe-aux-loss-coeff 1 2", "2 given for 1"),
        (f"{FOUR} --moe-aux-loss-coeff -1", "--moe-aux-loss-coeff -1.0: must be at least 0"),
        (f"{FOUR} --moe-z-loss-coeff nan", "--moe-z-loss-coeff nan: must be at least 0"),
        (f"{FOUR} --moe-router-enable-expert-bias", "use sigmoid or sqrtsoftplus"),
        (f"{FOUR} --moe-router-num-groups 2", "go together"),
        (f"{FOUR} --moe-router-num-groups 3 --moe-router-group-topk 1", "must divide"),
        (f"{FOUR} --moe-router-num-groups 4 --moe-router-group-topk 1", "and has 1 experts"),
    ],
)
def test_refusals_name_the_flag_and_the_reason(flags: str, told: str) -> None:
    message = experts_refusal(parsed(flags))
    assert message is not None
    assert told in message


def test_alltoall_is_the_default() -> None:
    assert DEFAULTS["--moe-token-dispatcher-type"] == "alltoall"


def test_what_is_reported() -> None:
    args = parsed(f"{FOUR} --num-layers 4 --moe-aux-loss-coeff 0.01 --moe-layer-freq 2")
    args.moe_aux_loss_coeff = 0.01  # as Megatron's validation leaves it
    found = auxiliary(args)
    assert found is not None
    assert found.losses == {"moe_aux_loss": "load_balancing_loss"}
    assert found.moe_layers == (True, False, True, False)
    args.moe_router_load_balancing_type = ["aux_loss", "seq_aux_loss"]
    args.moe_aux_loss_coeff, args.moe_z_loss_coeff = [0.0, 0.1], 0.001
    found = auxiliary(args)
    assert found is not None
    assert list(found.losses) == ["moe_seq_aux_loss", "moe_z_loss"]
    assert auxiliary(parsed("--num-layers 2")) is None
    assert moe_layers(parsed("--num-layers 2")) == [False, False]


def test_row_scale() -> None:
    """sum x scale / max(1, count) is sum / rows, whatever the count."""
    for count, rows in ((85, 196), (0, 7), (1, 1)):
        assert row_scale(count, rows) / max(1, count) == pytest.approx(1 / rows)
    assert row_scale(0, 0) == 0
