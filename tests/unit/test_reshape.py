"""Which optimizer states a run can go on from."""

from argparse import Namespace

import pytest

from megatron_bp.arguments.reshape import differs

PLAIN = {"use_distributed_optimizer": False, "tensor_model_parallel_size": 2}
SHARDED = {
    "use_distributed_optimizer": True,
    "dist_ckpt_optim_fully_reshardable": True,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
}
BY_OTHERS = SHARDED | {"dist_ckpt_optim_fully_reshardable": False}
ONE = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}


@pytest.mark.parametrize(
    ("saved", "run", "words"),
    [
        (PLAIN, PLAIN | ONE, None),
        (SHARDED, SHARDED | ONE, None),
        (SHARDED, SHARDED | {"pipeline_model_parallel_size": 2}, None),
        (BY_OTHERS, SHARDED, None),
        (BY_OTHERS, SHARDED | ONE, "without --dist-ckpt-optim-fully-reshardable"),
        (BY_OTHERS, SHARDED | {"pipeline_model_parallel_size": 2}, "keep them"),
        (PLAIN, SHARDED, "was saved without --use-distributed-optimizer"),
        (SHARDED, PLAIN, "was saved with --use-distributed-optimizer"),
        (SHARDED | {"no_save_optim": True}, PLAIN, None),
        ({}, SHARDED | ONE, None),
    ],
)
def test_the_optimizer_of_a_checkpoint(
    saved: dict[str, object], run: dict[str, object], words: str | None
) -> None:
    told = differs(Namespace(**saved), Namespace(**(ONE | run)))
    assert told is None if words is None else words in str(told)
    if words is not None:
        assert "--no-load-optim" in str(told)
