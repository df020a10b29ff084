"""The planner's memory: parts by hand, and what a layer keeps against autograd itself."""

from dataclasses import replace

import pytest

from megatron_bp.planning.counts import SlotCounts, count, full_rows, options_of
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.memory import in_flight, memory, peak
from megatron_bp.planning.rates import Uncounted
from megatron_bp.planning.shape import Attention, Layer, Mlp, Shape
from megatron_bp.planning.task import Precision, Task
from megatron_bp.sequence.plan import SequenceOptions, make_plan

# H 16, V 32, 2 layers of 4 query and 2 key heads of 8, SwiGLU of 24.
LAYER = Layer(Attention(4, 2, 8), Mlp(24))
SHAPE = Shape("tiny", 16, 32, False, (LAYER, LAYER))
TASK = Task(SHAPE, SequenceOptions(4), 32, precision=Precision(2, 4, 12))
NOTHING = Uncounted(1, 1.0)
# Attention 16 x (32 + 2 x 16) + 32 x 16, MLP 3 x 16 x 24, two norms.
OF_LAYER = 1024 + 512 + 1152 + 32
ALL = 2 * OF_LAYER + 2 * 32 * 16 + 16


def counted(task: Task, layout: Layout) -> SlotCounts:
    plan = make_plan(full_rows(task.length), options_of(task.sequence, layout))
    return count(plan, layout, {layer.attention.window for layer in task.shape.layers})


def parts(task: Task, layout: Layout, stage: int = 0) -> dict[str, int]:
    return memory(task, layout, counted(task, layout), stage, 0, NOTHING).parts


def test_weights_gradients_and_optimizer_are_those_of_every_parameter() -> None:
    found = parts(replace(TASK, distributed_optimizer=False), Layout(dp=2))
    assert (found["weights"], found["gradients"]) == (2 * ALL, 4 * ALL)
    assert found["optimizer"] == 12 * ALL
    assert SHAPE.parameters == ALL


def test_a_distributed_optimizer_is_shared_by_replicas_and_slot() -> None:
    found = parts(TASK, Layout(dp=2, bp=2, cp=2))
    assert (found["weights"], found["optimizer"]) == (2 * ALL, 3 * ALL)


def test_stages_and_tensor_parallel_ranks_hold_their_part() -> None:
    # A layer's matrices are halved, its norms are not; the last norm is the last stage's.
    half = (1024 + 512 + 1152) // 2 + 32 + 32 * 16 // 2
    layout = Layout(tp=2, pp=2)
    assert parts(TASK, layout)["weights"] == 2 * half
    assert parts(TASK, layout, stage=1)["weights"] == 2 * (half + 16)


def test_experts_have_replicas_of_their_own() -> None:
    layer = Layer(LAYER.attention, Mlp(0, 4, 2, 24))
    task = replace(TASK, shape=replace(SHAPE, layers=(layer,)))
    experts, dense = 4 * 1152, 1024 + 512 + 32 + 16 * 4 + 2 * 32 * 16 + 16
    found = parts(task, Layout(dp=2, bp=2, cp=2, ep=2))
    assert found["weights"] == 2 * (dense + experts // 2)
    assert found["optimizer"] == 12 * (dense // 4 + experts // 2 // 2)


def test_micro_batches_in_flight_fall_from_stage_to_stage() -> None:
    layout = Layout(pp=4, micro_batches=8)
    assert [in_flight(layout, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(replace(layout, micro_batches=2), 0) == 2


def test_the_peak_is_that_of_the_gpu_that_needs_most() -> None:
    layout = Layout(pp=2, micro_batches=4, recompute="none")
    counts = counted(TASK, layout)
    each = [memory(TASK, layout, counts, stage, 0, NOTHING).total for stage in range(2)]
    assert peak(TASK, layout, counts, NOTHING).total == max(each) > min(each)


@pytest.mark.parametrize("name", ["process", "slack"])
def test_either_measured_number_moves_the_total(name: str) -> None:
    counts, uncounted = counted(TASK, Layout()), Uncounted(10**6, 1.1)
    more = replace(uncounted, **{name: 1.2 * getattr(uncounted, name)})
    totals = [peak(TASK, Layout(), counts, u).total for u in (uncounted, more)]
    assert totals[1] > 1.01 * totals[0]
