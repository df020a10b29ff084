"""A layout in words, and as the flags that make it."""

from typing import Any

from megatron_bp.planning.layout import Layout
from megatron_bp.planning.task import Task

FORMS = {"all_gather": "all-gather", "ring": "ring"}


def mode_in_words(layout: Layout) -> str:
    """The mode, its degrees and, in mode CP, how K/V come: "CSBP 8", "hybrid 8/2", "CP 8 ring"."""
    bp, cp, mode = layout.bp, layout.cp, layout.mode
    if mode == "single":
        return "single"
    if mode == "hybrid":
        return f"hybrid {bp}/{cp}"
    if mode != "CP":
        return f"{mode} {bp}"
    if layout.over_heads:
        return f"CP {cp} a2a"
    return f"CP {cp} {'clean all-gather' if layout.aligned else FORMS[layout.exchange.form]}"


def family(layout: Layout) -> str:
    """The mode and, in mode CP, how K/V come, without degrees."""
    words = mode_in_words(layout).split(" ")
    return " ".join(word for word in words if not word[0].isdigit())


def in_words(layout: Layout) -> str:
    """Such as "DP 2, CSBP 8, full recompute"; degrees of 1 are left out."""
    parts = [
        f"TP {layout.tp}{'' if layout.sequence_parallel else ' without SP'}"
        if layout.tp > 1
        else "",
        f"PP {layout.pp}" if layout.pp > 1 else "",
        f"EP {layout.ep}" if layout.ep > 1 else "",
        f"DP {layout.dp}" if layout.dp > 1 else "",
        mode_in_words(layout),
        f"K/V in chunks of {layout.exchange.most_rows:,} rows" if layout.exchange.most_rows else "",
        f"micro-batches of {layout.micro_batch}" if layout.micro_batch > 1 else "",
        recompute_in_words(layout),
    ]
    return ", ".join(part for part in parts if part)


def recompute_in_words(layout: Layout) -> str:
    """What the backward computes again."""
    if layout.recompute == "full":
        return "full recompute but attention" if layout.keep_attention else "full recompute"
    return {"none": "no recompute", "attention": "attention recomputed"}[layout.recompute]


def flags(task: Task, layout: Layout) -> dict[str, dict[str, Any]]:
    """Sections of a config file: what it has to say for this layout, defaults included."""
    cp = layout.mode == "CP"
    attention: dict[str, Any] = {
        "block_parallel_size": layout.bp,
        "context_parallel_size": layout.cp,
    }
    if cp:
        forms = {"all_gather": "all_gather", "ring": "p2p"}
        form = "clean_all_gather" if layout.aligned else forms[layout.exchange.form]
        attention["cp_comm_type"] = "a2a" if layout.over_heads else form
    elif layout.exchange.form != "auto":
        attention["clean_kv_exchange"] = layout.exchange.form
    if layout.exchange.most_rows is not None:
        attention["clean_kv_rows"] = layout.exchange.most_rows
    degrees: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "use_distributed_optimizer": task.distributed_optimizer,
    }
    memory: dict[str, Any] = {"micro_batch_size": layout.micro_batch}
    if layout.recompute == "full":
        memory |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "recompute_keep_attention": layout.keep_attention,
        }
    elif layout.recompute == "attention":
        memory |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {"block_diffusion": attention, "parallelism": degrees, "memory": memory}
