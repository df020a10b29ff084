"""The planner's memory: parts by hand, and what a layer keeps against autograd itself."""

import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_bp.attention.exchange.choose import ExchangeOptions
from megatron_bp.planning.arrivals import exchange_bytes
from megatron_bp.planning.counts import SlotCounts, count, full_rows, options_of
from megatron_bp.planning.kept import norm_numbers, numbers
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
    assert found["gradients"] == 4 * ALL
    shared = parts(replace(TASK, sharded_gradients=True), Layout(dp=2, bp=2, cp=2))
    assert shared["gradients"] == ALL


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


def test_kept_activations_under_full_recompute_are_the_inputs_of_layers() -> None:
    # 32 tokens in blocks of 4: 28 clean and 32 corrupted rows; angles of 8 in float32, and the last
    # norm keeps its input and its output, at the head.
    found = parts(TASK, Layout(recompute="full"))
    inputs, angles = 60 * 2 * 16 * 2, 60 * 8 * 4
    in_backward = inputs + angles
    # Of the layer that is computed again: two norms with in- and output, but for the input that is
    # kept; cosines and sines, rotated and as projected, output, log-sum-exp; MLP.
    norms, attention, mlp = 3 * 16, 4 * 8 + (32 + 16) + (32 + 32) + 32, 3 * 24
    again = 60 * (2 * (norms + attention + mlp) + 4 * 4)
    # The gradient of its output, two of hidden units, and that of the largest matrix.
    working = 60 * 2 * (16 + 2 * 24) + 2 * 16 * 64
    # Attention's: gradient round the layer, of the output and the queries in bfloat16, keys' too;
    # queries' and keys' in float32. The MLP has let go of what it kept.
    later = again - 60 * 2 * (2 * 16 + mlp) + 60 * (2 * (16 + 2 * 32 + 32) + 4 * (32 + 32))
    assert found["kept activations"] == in_backward
    assert found["working set"] == max(again + working, later + 2 * 16 * 64)


def test_torch_rms_norm_keeps_two_float32_rows_and_its_output() -> None:
    of = {}
    for size in (2, 4):
        task = replace(TASK, fused=False, precision=Precision(size, 4, 12))
        of[size] = size * norm_numbers(task, Layout())
    assert of == {2: 16 * (4 + 4 + 2), 4: 16 * (4 + 4 + 4)}
    for size, dtype in ((2, torch.bfloat16), (4, torch.float32)):
        norm, kept = torch.nn.RMSNorm(16, dtype=dtype), {}
        x = torch.ones(5, 16, dtype=dtype, requires_grad=True)

        def keep(t: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[t.data_ptr()] = t.nbytes if t.shape == (5, 16) else 0
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = norm(x)
        assert sum(kept.values()) + out.nbytes == 5 * of[size]


def test_attention_that_is_kept_adds_its_result() -> None:
    more, less = (parts(TASK, Layout(keep_attention=keep)) for keep in (True, False))
    gained = more["kept activations"] - less["kept activations"]
    assert gained == 2 * 60 * (2 * 32 + 4 * 4)  # output, log-sum-exp; two layers


def test_the_loss_head_holds_a_chunk_of_logits() -> None:
    # V 2^15: scored rows are 16, so 16 x 2^15 logits; little else counts.
    task = replace(TASK, shape=replace(SHAPE, vocabulary=1 << 15))
    table = (1 << 15) * 16
    scored = 2 * 16 * 16 * 2  # hidden rows and their gradients
    assert parts(task, Layout())["loss head"] == 8 * 16 * (1 << 15) + scored + (4 + 2) * table


def of_others(**more: Any) -> float:
    """In numbers of a row's K|V, 2 x 2 x 8: of 28 clean rows this rank has 12 and lacks 16."""
    layout = Layout(bp=2, cp=2, **more)
    attention = LAYER.attention
    assert attention is not None
    return exchange_bytes(TASK, layout, counted(TASK, layout), 0, attention) / 32


def test_rows_of_other_ranks_and_their_gradients() -> None:
    # K/V, gradients in float32, and as they travel: from both ranks' buffers of 16 rows, and back.
    assert of_others(exchange=ExchangeOptions("all_gather")) == 16 * (2 + 4) + 2 * 2 * 32
    # One shard at a time, whose gradients travel in float32.
    assert of_others(exchange=ExchangeOptions("ring")) == 16 * (2 + 4 + 4 + 4)
    # Chunks of 2 x 4 rows: 4 that arrive, 8 that are under way.
    few = {"exchange": ExchangeOptions("all_gather", 8), "recompute": "none"}
    assert of_others(**few) == 4 * (2 + 4) + 8 * 2 + 2 * 2 * 8
    # What a recomputed forward brought is held as a whole, in however many chunks.
    assert of_others(exchange=few["exchange"]) == 16 * 2 + 4 * 4 + 2 * 2 * 8


def test_fused_layers_keep_less() -> None:
    """Of a row in bf16: a fused norm keeps 16 and 16, torch's 16 and twice 16 in float32.

    Attention: angles' cosines and sines 4 x 8, rotated 32 + 16, projected 32 + 32, the result 32.
    SwiGLU of 24: fused 2 x 24 and 24, else also the activated half and the other one.
    """
    fused = numbers(TASK, Layout(), LAYER)
    assert (fused.attention, fused.mlp) == (32 + 176, 32 + 3 * 24)
    local = numbers(replace(TASK, fused=False), Layout(), LAYER)
    assert (local.attention, local.mlp) == (80 + 176, 80 + 5 * 24)
    plain = Layer(LAYER.attention, Mlp(24, gated=False))
    assert numbers(TASK, Layout(), plain).mlp == 32 + 2 * 24


@pytest.mark.ranks
@pytest.mark.parametrize("experts", [0, 4])
def test_kept_activations_are_what_autograd_keeps(experts: int) -> None:
    """One layer more, in a model of Megatron's; experts also keep some indices."""
    import ranks

    saved, live = ranks.run_ranks(1, one_layer, experts, fresh=True)[0]
    mlp = Mlp(0, experts, 2, 192) if experts else Mlp(192)
    shape = Shape("built", 64, 256, False, (Layer(Attention(4, 2, 16), mlp),))
    task = Task(shape, SequenceOptions(32), 512, precision=Precision(4, 4, 8), fused=False)
    of = numbers(task, Layout(), shape.layers[0])
    rows = 512 + 480
    assert saved == pytest.approx(4 * rows * (of.kept + of.wide), rel=0.02)
    if not experts:  # an untrained router sends most rows to one expert
        # Two layers; the second's backward is at work. The first one's input is the embedding.
        expected = 4 * rows * (2 * (of.kept + of.wide) + of.mlp_backward + 16)
        assert live == pytest.approx(expected, rel=0.03)


def one_layer(rank: int, world: int, experts: int) -> tuple[int, int]:
    """(bytes saved for one layer more, bytes of tensors that live at the peak with two layers)."""
    from megatron.core import transformer

    from megatron_bp.attention.kernels.choose import choose
    from megatron_bp.attention.layout import AttentionOptions
    from megatron_bp.tools.bench.model import build, one_process, step

    torch.distributed.destroy_process_group()  # one_process makes its own
    more: dict[str, Any] = {"num_moe_experts": experts, "moe_router_topk": 2}
    more |= {"moe_token_dispatcher_type": "alltoall", "moe_ffn_hidden_size": 192}
    plain = transformer.TransformerConfig
    if experts:
        transformer.TransformerConfig = partial(plain, **more)
    sample, found, peaks = full_rows(512), [], []
    plan = make_plan(sample, SequenceOptions(32))
    options = AttentionOptions(choose("auto", "cpu", torch.float32, 16))
    with one_process(1):
        for layers in (2, 1):  # the router's counters stand for the larger model
            model = build(layers, 4, 16, 2)
            step(model, sample, plan, options)
            weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
            storages: dict[int, Any] = {}

            def keep(x: Any, storages: dict[int, Any] = storages) -> Any:
                storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
                return x

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                step(model, sample, plan, options)
            found.append(sum(s.nbytes() for at, s in storages.items() if at not in weights))
            storages.clear()
            with Live(weights) as live:
                step(model, sample, plan, options)
            peaks.append(live.peak)
    return found[0] - found[1], peaks[0]


class Live(TorchDispatchMode):
    """Follows the bytes of the tensors that live, weights apart."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self.weights, self.bytes, self.peak, self.known = weights, 0, 0, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                key = storage._cdata
                if key not in self.known and storage.data_ptr() not in self.weights:
                    self.known.add(key)
                    self.bytes += storage.nbytes()
                    weakref.finalize(storage, self.gone, key, storage.nbytes())
        self.peak = max(self.peak, self.bytes)
        return out

    def gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.bytes -= size
