"""The whole model through Megatron's DDP and schedule on n ranks, for tests to compare.

`step_on_rank` is the function for `run_ranks`; `oracle_step` computes the same from definitions.
Weights come from their names, so that every layout starts from one checkpoint.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import oracle
import torch
from cases import Case, sample_of
from faults import plant
from torch import Tensor
from traffic import Sent, recording

VOCABULARY = 50
SEED = 5
FFN = 40
WIDTH = 20  # of the self-conditioning module
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Shape:
    """A model, its oracle's view of it, and a batch of packed rows (one a micro-batch)."""

    gpt: oracle.GPTShape
    rows: tuple[Case, ...]
    vocabulary: int = VOCABULARY
    divisible_by: int = 16
    weighting: str = "bound"
    extra: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    windows: list[int | None] | None = None  # of each layer, where they differ
    copies: int = 1
    exchange: dict[str, Any] = field(default_factory=lambda: {"form": "all_gather"})
    attention: dict[str, Any] = field(default_factory=dict)
    kernel: str = "sdpa"
    align_chunks: bool = False

    @property
    def experts(self) -> int:
        """Of each MoE layer; 0 in a dense model."""
        return int(self.extra.get("num_moe_experts", 0))

    @property
    def mask_id(self) -> int:
        return self.vocabulary - 1


LLAMA = oracle.GPTShape(layers=2, hidden=32, heads=4, groups=2, head_dim=8)
QWEN3 = oracle.GPTShape(
    layers=2, hidden=24, heads=6, groups=2, head_dim=8, eps=1e-6, tied=True, qk_layernorm=True
)
GPT = oracle.GPTShape(
    layers=2, hidden=32, heads=4, groups=4, head_dim=8, norm="LayerNorm", swiglu=False, tied=True
)
PACKED = Case((5, 6, 13, 1), 4, padding=3)
YARN = (8.0, 64, 4.0, 0.5)  # of four pairs one is not stretched, one in part
SHAPES = {
    "llama": Shape(LLAMA, (PACKED, Case((24,), 4), Case((9, 15), 4), PACKED)),
    "qwen3, token-causal, prompts": Shape(
        QWEN3, (Case((10, 8, 9), 4, prompts=(0, 2), clean_relation="token"),) * 4
    ),
    "gpt, window, causal units, weight one": Shape(
        GPT,
        (Case((19, 14), 4, window=5, own_relation="causal"),) * 4,
        weighting="one",
        extra={"add_bias_linear": True, "window_size": (4, 0)},
    ),
    "interleaved half rotary, every other layer windowed": Shape(
        dataclasses.replace(LLAMA, rotary_percent=0.5, rotary_interleaved=True),
        (Case((19, 14), 4),) * 4,
        extra={"rotary_interleaved": True, "window_size": (4, 0), "window_attn_skip_freq": 2},
        windows=[5, None],
    ),
    "YaRN, queries scaled by position": Shape(
        dataclasses.replace(LLAMA, rotary_base=500.0, yarn=YARN, query_scale=(0.4, 5)),
        (PACKED, Case((24,), 4), Case((9, 15), 4), PACKED),
    ),
    "uniform, cosine, antithetic": Shape(
        LLAMA,
        (PACKED, Case((24,), 4), Case((9, 15), 4), PACKED),
        objective={"noise": "uniform", "schedule": "cosine", "antithetic": True},
    ),
    "noise per document, inverse p": Shape(
        LLAMA,
        (PACKED,) * 4,
        weighting="inverse_p",
        objective={"noise_per": "document", "interval": (0.2, 0.7)},
    ),
    "next-token term": Shape(
        QWEN3,
        (
            Case((10, 8, 9), 4, prompts=(0,), clean_relation="token"),
            Case((24,), 4, clean_relation="token"),
            Case((1, 6), 4, clean_relation="token"),
            Case((9,), 4, prompts=(0,), clean_relation="token"),
        ),
        objective={"ar_weight": 0.7, "diffusion_weight": 0.3},
    ),
    "mask token left out, next-token term": Shape(
        QWEN3,
        (
            Case((10, 8, 9), 4, prompts=(0,), clean_relation="token"),
            Case((24,), 4, clean_relation="token"),
            Case((1, 6), 4, clean_relation="token"),
            Case((9,), 4, prompts=(0,), clean_relation="token"),
        ),
        objective={"ar_weight": 0.7, "exclude_mask_logit": True},
    ),
    "fewer units than ranks, nothing supervised": Shape(
        LLAMA, (Case((3,), 4), Case((10, 6), 4, prompts=(0, 1)), Case((1,), 4), Case((9,), 4))
    ),
}

# Two chats, one of two turns: prompts of 3, 2 and 9 tokens, responses of 6, 5 and 4; a text.
CHATS = Case(
    (17, 15, 5),
    4,
    padding=2,
    responses=(((3, 9), (11, 16)), ((9, 13),), ((0, 5),)),
)
TURNS = Case((11, 9), 4, responses=(((4, 8),), ((1, 3), (8, 9))))
NOTHING = Case((6,), 4, prompts=(0,))


def chats(**how: Any) -> tuple[Case, ...]:
    """The chats seen in some way, one row a micro-batch; the third row is a prompt alone."""
    return tuple(dataclasses.replace(case, **how) for case in (CHATS, TURNS, NOTHING, CHATS))


# What `arguments/presets.py` makes of each preset (tests/unit/test_presets.py holds them equal).
PRESETS = {
    "fast_dllm_v2": Shape(
        LLAMA,
        chats(),
        weighting="one",
        objective={"alignment": "next", "complementary": True},
        copies=2,
    ),
    "nemotron": Shape(
        QWEN3,
        chats(clean_relation="token"),
        weighting="inverse_p",
        objective={
            "noise_per": "document",
            "count": "joint",
            "diffusion_weight": 0.3,
            "ar_weight": 1.0,
        },
    ),
    "diffusion_gemma": Shape(
        LLAMA,
        chats(clean_relation="token", grid="response", window_anchor="block"),
        weighting="one",
        objective={"noise": "uniform", "scored": "all", "ar_weight": 1.0, "ar_scored": "all"},
    ),
}
SHAPES |= PRESETS | {
    "three copies, next, response grid, ids left alone, corrupted count": Shape(
        LLAMA,
        chats(grid="response"),
        objective={"alignment": "next", "never_corrupt": (1, 7, 9, 30), "count": "corrupted"},
        copies=3,
    ),
    "window from the block, two copies": Shape(
        LLAMA,
        (Case((19, 14), 4, window_anchor="block"),) * 4,
        extra={"window_size": (4, 0), "window_attn_skip_freq": 2},
        windows=[5, None],
        copies=2,
    ),
}


def value_of(name: str, size: torch.Size, vocabulary: int) -> Tensor:
    """A parameter's value, from its name and shape alone; of a vocabulary, from its true rows."""
    seed = sum(ord(c) * (i + 1) for i, c in enumerate(name)) % 2**31
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.15

    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        return torch.cat([normal(vocabulary, *size[1:]), normal(size[0] - vocabulary, *size[1:])])
    value = normal(*size)
    return 1 + value if "norm" in name and name.endswith("weight") else value


def weights_of(state: dict[str, Tensor], vocabulary: int) -> None:
    """Set every parameter, in place, to its `value_of`."""
    for name, tensor in state.items():
        tensor.copy_(value_of(name, tensor.shape, vocabulary))


def build(shape: Shape, ddp: bool = True) -> torch.nn.Module:
    """The model on this rank, wrapped in Megatron's DDP; parallel state stands already."""
    (model,) = build_chunks(shape, ddp)
    with torch.no_grad():
        named = {global_name(name): p for name, p in model.named_parameters()}
        weights_of(named, shape.vocabulary)
    return model


def build_chunks(
    shape: Shape, ddp: bool = True, distributed_optimizer: bool = False
) -> list[torch.nn.Module]:
    """This rank's chunks of the model, their weights as Megatron starts them."""
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from megatron_bp.model.config import BDLMModelBuilder, BDLMModelConfig

    model_parallel_cuda_manual_seed(1)
    gpt = shape.gpt
    bp, cp = degrees(torch.distributed.get_world_size() if SLOT is None else SLOT)
    settings: dict[str, Any] = {
        "num_layers": gpt.layers,
        "hidden_size": gpt.hidden,
        "num_attention_heads": gpt.heads,
        "num_query_groups": gpt.groups,
        "kv_channels": gpt.head_dim,
        "ffn_hidden_size": FFN,
        "normalization": gpt.norm,
        "layernorm_epsilon": gpt.eps,
        "gated_linear_unit": gpt.swiglu,
        "activation_func": torch.nn.functional.silu if gpt.swiglu else torch.nn.functional.gelu,
        "qk_layernorm": gpt.qk_layernorm,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "transformer_impl": "local",
        "context_parallel_size": max(bp, cp),
        "expert_model_parallel_size": mpu.get_expert_model_parallel_world_size(),
        "calculate_per_token_loss": True,
    }
    transformer = TransformerConfig(**(settings | shape.extra))
    if gpt.yarn is not None:
        stretch, length, fast, slow = gpt.yarn
        of_yarn = {
            "yarn_rotary_scaling_factor": stretch,
            "yarn_original_max_position_embeddings": length,
            "yarn_beta_fast": fast,
            "yarn_beta_slow": slow,
            "yarn_mscale": 1.0,
            "yarn_mscale_all_dim": 0.0,
            "yarn_correction_range_round_to_int": True,
        }
        for name, value in of_yarn.items():  # as Megatron's parser does
            setattr(transformer, name, value)
    config = BDLMModelConfig(
        transformer=transformer,
        vocab_size=shape.vocabulary,
        make_vocab_size_divisible_by=shape.divisible_by,
        should_pad_vocab=True,
        share_embeddings_and_output_weights=gpt.tied,
        position_embedding_type="rope" if gpt.yarn is None else "yarn",
        rotary_percent=gpt.rotary_percent,
        rotary_base=int(gpt.rotary_base),
        block_parallel_size=bp,
        clean_shard_size=cp,
        self_conditioning_width=WIDTH if "self_conditioning" in shape.objective else 0,
    )
    chunks: list[torch.nn.Module] = BDLMModelBuilder(config).build_distributed_models(
        ProcessGroupCollection.use_mpu_process_groups(),
        DistributedDataParallelConfig(use_distributed_optimizer=distributed_optimizer),
        wrap_with_ddp=ddp,
        data_parallel_random_init=False,
        mixed_precision_wrapper=None,
    )
    return chunks


def global_name(name: str) -> str:
    """The parameter's name where one rank holds all experts, and without DDP's prefix."""
    from megatron.core import parallel_state as mpu

    name = name.removeprefix("module.")
    before, expert, after = name.partition(".local_experts.")
    if not expert:
        return name
    place, _, rest = after.partition(".")
    here = EXPERTS // mpu.get_expert_model_parallel_world_size()
    return f"{before}{expert}{int(place) + here * mpu.get_expert_model_parallel_rank()}.{rest}"


def by_global_name(model: torch.nn.Module, value: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """`value` of every parameter, the experts of other ranks included."""
    from megatron.core import parallel_state as mpu

    mine = {global_name(name): value(p) for name, p in model.named_parameters()}
    every: list[Any] = [None] * mpu.get_expert_model_parallel_world_size()
    group = mpu.get_expert_model_parallel_group()
    torch.distributed.all_gather_object(every, mine, group=group)
    return {name: tensor for of_rank in every for name, tensor in of_rank.items()}


Slot = int | tuple[int, int]
SLOT: Slot | None = None
EXPERTS = 0


def degrees(slot: Slot) -> tuple[int, int]:
    """(BP, CP); a number alone is both."""
    return slot if isinstance(slot, tuple) else (slot, slot)


def scoring(shape: Shape) -> str:
    """What clean rows are scored on."""
    if shape.objective.get("ar_weight", 0.0) == 0:
        return "none"
    return str(shape.objective.get("ar_scored", "supervised"))


def attention_of(shape: Shape) -> Any:
    from megatron_bp.attention.exchange.choose import ExchangeOptions
    from megatron_bp.attention.kernels.choose import choose
    from megatron_bp.attention.layout import AttentionOptions
    from megatron_bp.attention.query_scale import QueryScale

    kernel = choose(shape.kernel, "cpu", torch.float32, shape.gpt.head_dim)
    scale = shape.gpt.query_scale
    return AttentionOptions(
        kernel,
        ExchangeOptions(**shape.exchange),
        **shape.attention,
        query_scale=None if scale is None else QueryScale(*scale),
    )


def settings_of(case: Case, shape: Shape, slot: Slot, micro_batches: int) -> Any:
    from megatron_bp.diffusion.objective import Objective
    from megatron_bp.sequence.plan import SequenceOptions
    from megatron_bp.training.step import StepSettings

    return StepSettings(
        attention=attention_of(shape),
        sequence=SequenceOptions(
            case.block_size,
            *degrees(slot),
            clean_relation=case.clean_relation,
            own_relation=case.own_relation,
            score_clean=scoring(shape),
            grid=case.grid,
            alignment=shape.objective.get("alignment", "same"),
            copies=shape.copies,
            window_anchor=case.window_anchor,
            align_chunks=shape.align_chunks,
        ),
        objective=Objective(
            shape.mask_id,
            shape.vocabulary,
            seed=SEED,
            weighting=shape.weighting,
            **shape.objective,
        ),
        micro_batches=lambda training: micro_batches,
        count_rows=shape.experts > 0,
    )


def batches_of(shape: Shape) -> list[dict[str, Tensor]]:
    """The rows as Megatron's DataLoader hands them over."""
    from megatron_bp.batch.dataset import SampleDataset
    from megatron_bp.data.document import Document

    class Rows:
        def __len__(self) -> int:
            return len(shape.rows)

        def __getitem__(self, idx: int) -> dict[str, Any]:
            sample = sample_of(shape.rows[idx], shape.vocabulary - 1, seed=idx)
            used = sample.document >= 0
            return {
                "documents": tuple(
                    Document(
                        sample.tokens[used & (sample.document == d)],
                        sample.supervised[used & (sample.document == d)],
                        1000 * idx + shape.rows[idx].first + d,
                    )
                    for d in range(len(sample.document_keys))
                )
            }

    lengths = [sum(c.lengths) + c.padding for c in shape.rows]
    sets = [SampleDataset(Rows(), length, 0) for length in lengths]
    collate = torch.utils.data.default_collate
    return [collate([sets[i][i]]) for i in range(len(lengths))]


def step_on_rank(
    rank: int,
    world: int,
    shape: Shape,
    slot: Slot,
    recompute: bool = False,
    fault: str | None = None,
    ep: int = 1,
) -> dict[str, Any]:
    """One step: (sum, count) over all rows, and every parameter's gradient before clipping.

    Degrees (BP, CP) make the slot; the rest is data parallel, which deals out the micro-batches.
    `ep` ranks of all share the experts.
    """
    global SLOT, EXPERTS
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    from megatron_bp.training.step import forward_step

    size = max(degrees(slot))
    mpu.initialize_model_parallel(context_parallel_size=size, expert_model_parallel_size=ep)
    SLOT, EXPERTS = slot, shape.experts
    if recompute:
        shape = Shape(
            **{
                **shape.__dict__,
                "extra": shape.extra
                | {
                    "recompute_granularity": "full",
                    "recompute_method": "uniform",
                    "recompute_num_layers": 1,
                },
            }
        )
    model = build(shape)
    config = get_model_config(model)
    config.finalize_model_grads_func = finalize_model_grads
    config.timers = None
    data = world // size
    mine = batches_of(shape)[mpu.get_data_parallel_rank() :: data]
    init_num_microbatches_calculator(rank, None, len(shape.rows), 1, data, False)
    model.zero_grad_buffer()
    sent: list[Sent] = []
    with plant(fault, rank), recording(sent):
        losses = get_forward_backward_func()(
            forward_step_func=partial(
                forward_step, settings_of(shape.rows[0], shape, slot, len(mine))
            ),
            data_iterator=iter(mine),
            model=[model],
            num_microbatches=len(mine),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
    loss, counts = loss_over_ranks(shape, losses)
    return {
        "loss": loss,
        "count": counts,
        "sent": sent,
        "grads": by_global_name(model, lambda p: p.main_grad.clone()),
        "weights": by_global_name(model, lambda p: p.detach().clone()),
        "auxiliary": auxiliary_of(shape),
        "expert bias": {
            name.removeprefix("module."): buffer.clone()
            for name, buffer in model.named_buffers()
            if name.endswith("expert_bias") and buffer is not None
        },
    }


def auxiliary_of(shape: Shape) -> dict[str, list[float]]:
    """Each auxiliary loss of the step without its coefficient, of each layer."""
    from megatron_bp.model.moe import ROWS, take_sums

    names = ("load_balancing_loss", "seq_load_balancing_loss", "z_loss", ROWS)
    sums = take_sums(names, shape.gpt.layers, "cpu")
    torch.distributed.all_reduce(sums)
    means = (sums / sums[-1].clamp(min=1)).tolist()
    return {name: means[k] for k, name in enumerate(names[:-1])} | {ROWS: sums[-1].tolist()}


def loss_over_ranks(shape: Shape, losses: list[dict[str, Tensor]]) -> tuple[float, list[int]]:
    """The step's loss and the count of each term, from what the micro-batches reported."""
    from megatron.core import parallel_state as mpu

    loss, counts = 0.0, []
    for name, factor in (
        ("diffusion loss", shape.objective.get("diffusion_weight", 1.0)),
        ("ar loss", shape.objective.get("ar_weight", 0.0)),
    ):
        if name not in losses[0]:
            continue
        total = torch.stack([x[name] for x in losses]).sum(0)
        torch.distributed.all_reduce(total, group=mpu.get_data_parallel_group(True))
        loss += factor * (total[0] / max(1.0, total[1].item())).item()
        counts.append(int(total[1]))
    return loss, counts


def draws_of(shape: Shape, case: Case, key: int, block: list[int], copy: int) -> oracle.Draws:
    """The project's noise in one copy, all that the oracle gets of it."""
    from megatron_bp.diffusion.levels import levels
    from megatron_bp.diffusion.noise import NoiseKey, Purpose, uniform

    t, u, other, first = [], [], [], 0
    objective = settings_of(case, shape, 1, 1).objective
    for ordinal, length in enumerate(case.lengths):
        noise = NoiseKey(SEED, 0, 0, key + ordinal, copy)
        blocks = len(set(block[first : first + length]))
        t += levels(noise, blocks, objective, objective.interval).tolist()
        u += uniform(noise, Purpose.MASK, 0, length).tolist()
        ids = uniform(noise, Purpose.REPLACEMENT, 0, length) * shape.vocabulary
        other += ids.astype(int).tolist() if objective.noise == "uniform" else []
        first += length
    nothing = [0] * case.padding
    others = other + nothing if other else [shape.mask_id] * (first + case.padding)
    return oracle.Draws(t, u + [1.0] * case.padding, others)


def table_of(shape: Shape, case: Case, number: int) -> tuple[list[int], list[oracle.Row]]:
    """(block of each position, corrupted rows) of row `number`, from the definitions."""
    sample = sample_of(case, shape.vocabulary - 1, seed=number)
    document, supervised = sample.document.tolist(), sample.supervised.tolist()
    block = oracle.block_of(document, case.block_size, supervised, case.grid)
    o = shape.objective
    key = 1000 * number + case.first
    table = oracle.corrupted_table(
        sample.tokens.tolist(),
        document,
        block,
        supervised,
        [draws_of(shape, case, key, block, c) for c in range(shape.copies)],
        weighting=shape.weighting,
        schedule=o.get("schedule", "linear"),
        complementary=o.get("complementary", False),
        never=o.get("never_corrupt", ()),
        alignment=o.get("alignment", "same"),
        scored=o.get("scored", "corrupted"),
        count="supervised" if o.get("count", "supervised") == "supervised" else "corrupted",
    )
    return block, table


def coins_of(shape: Shape, case: Case, number: int) -> list[bool] | None:
    """Whether each document of row `number` is conditioned; None without self-conditioning."""
    from megatron_bp.diffusion.noise import NoiseKey, Purpose, uniform

    share = shape.objective.get("self_conditioning", 0.0)
    if share == 0.0:
        return None
    keys = [1000 * number + case.first + ordinal for ordinal in range(len(case.lengths))]
    noise = [NoiseKey(SEED, 0, 0, key, 0) for key in keys]
    return [bool(uniform(n, Purpose.SELF_CONDITIONING, 0, 1)[0] < share) for n in noise]


def oracle_step(shape: Shape, weights: dict[str, Tensor]) -> dict[str, Any]:
    """The same step from the definitions, dense, float64, one process."""
    leaves = {name: w.double().requires_grad_() for name, w in weights.items()}
    total, count = torch.zeros((), dtype=torch.float64), 0
    ar_total, ar_count = torch.zeros((), dtype=torch.float64), 0
    scores = scoring(shape)
    routers: list[list[Tensor]] = []  # of each micro-batch, of each MoE layer
    for i, case in enumerate(shape.rows):
        sample = sample_of(case, shape.vocabulary - 1, seed=i)
        block, table = table_of(shape, case, i)
        document, supervised = sample.document.tolist(), sample.supervised.tolist()
        if scores == "all":  # of documents with a corrupted row
            with_rows = {document[row.position] for row in table}
            supervised = [d in with_rows for d in document]
        if scores != "none":
            ar = oracle.next_token(
                leaves,
                shape.gpt,
                sample.tokens.tolist(),
                document,
                vocab=shape.vocabulary,
                supervised=supervised,
            )
            ar_total, ar_count = ar_total + ar[0], ar_count + ar[1]
        of_row, counted, of_routers = oracle.diffusion(
            leaves,
            shape.gpt,
            sample.tokens.tolist(),
            document,
            block,
            table,
            vocab=shape.vocabulary,
            excluded=[shape.mask_id] if shape.objective.get("exclude_mask_logit") else [],
            clean_relation=case.clean_relation,
            own_relation=case.own_relation,
            window=shape.windows or case.window,
            window_anchor=case.window_anchor,
            conditioned=coins_of(shape, case, i),
            alignment=shape.objective.get("alignment", "same"),
            routed={"none": "seen", "supervised": "scored", "all": "whole"}[scores],
        )
        total, count = total + of_row, count + counted
        routers.append(of_routers)
    divisor, ar_divisor = count, ar_count
    if shape.objective.get("count") == "joint":
        divisor = ar_divisor = count + ar_count
    loss = shape.objective.get("diffusion_weight", 1.0) * total / max(1, divisor)
    counts = [divisor]
    if scores != "none":
        loss = loss + shape.objective["ar_weight"] * ar_total / max(1, ar_divisor)
        counts.append(ar_divisor)
    terms = loss.item()
    balance, z, rows = auxiliary_oracle(shape, routers)
    loss = loss + shape.extra.get("moe_aux_loss_coeff", 0.0) * sum(balance)
    loss = loss + shape.extra.get("moe_z_loss_coeff", 0.0) * sum(z)
    if loss.requires_grad:
        loss.backward()
    grads = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in leaves.items()}
    return {
        "loss": terms,
        "count": counts,
        "grads": grads,
        "balance": [x.item() for x in balance],
        "z": [x.item() for x in z],
        "rows": rows,
        "chosen": _choices(shape, routers),
        "margin": _margin(shape, routers),
    }


def auxiliary_oracle(
    shape: Shape, routers: list[list[Tensor]]
) -> tuple[list[Tensor], list[Tensor], int]:
    """(balance loss, z loss) of each MoE layer without coefficients, and the rows of the step.

    Means over all rows of the step: a micro-batch's balance loss counts as often as it has rows.
    """
    layers = [[of_batch[k] for of_batch in routers] for k in range(len(routers[0]))]
    rows = sum(len(logits) for logits in layers[0]) if layers else 0
    balance, z = [], []
    for batches in layers:
        parts = [len(x) * oracle.switch_loss(x, shape.gpt.topk, shape.gpt.score) for x in batches]
        balance.append(torch.stack(parts).sum() / max(1, rows))
        z.append(torch.stack([oracle.z_loss(x) for x in batches]).sum() / max(1, rows))
    return balance, z, rows


def _choices(shape: Shape, routers: list[list[Tensor]]) -> list[Tensor]:
    """How often each expert is chosen in the step, int64[E], of each MoE layer."""
    return [
        torch.bincount(
            torch.cat([of_batch[k] for of_batch in routers])
            .argsort(dim=-1, descending=True)[:, : shape.gpt.topk]
            .flatten(),
            minlength=shape.experts,
        )
        for k in range(len(routers[0]))
    ]


def worst_gradient(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, str]:
    """max over parameters of ||g - g0|| / max(||g0||, floor), and the parameter's name.

    The floor, 1e-3 of the largest norm, keeps a parameter whose gradient all but vanishes from
    being judged by its rounding alone.
    """
    assert got.keys() == want.keys()
    floor = 1e-3 * max(g.double().norm().item() for g in want.values())
    errors = {
        name: ((got[name].double() - g.double()).norm() / max(g.double().norm(), floor or 1.0))
        for name, g in want.items()
    }
    name = max(errors, key=lambda n: errors[n])
    return float(errors[name]), name


def check_step(got: dict[str, Any], want: dict[str, Any], where: str) -> None:
    """The same loss, count and gradients: the one comparison that every layout has to pass."""
    assert got["count"] == want["count"], where
    assert abs(got["loss"] - want["loss"]) <= 1e-6 * abs(want["loss"]), where
    error, parameter = worst_gradient(got["grads"], want["grads"])
    assert error < TOLERANCE, f"{where}: {parameter} {error}"


def _margin(shape: Shape, routers: list[list[Tensor]]) -> float:
    """The least gap between the last logit chosen and the first not, of all rows and layers."""
    gaps = [
        of_layer.detach().sort(dim=-1, descending=True).values[:, k - 1 : k + 1].diff().abs()
        for of_batch in routers
        for of_layer in of_batch
        for k in [shape.gpt.topk]
    ]
    return min((g.min().item() for g in gaps if len(g)), default=1.0)
