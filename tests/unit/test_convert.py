"""Models of Hugging Face into Megatron checkpoints and back, against transformers' own logits."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from tiny import (
    FAMILIES,
    MODELS,
    NVIDIAS,
    SWAPS,
    VOCABULARY,
    as_ministral3,
    as_nvidia_publishes,
    change,
    save_tiny,
)

from megatron_bp.tools.convert.agreement import FREQUENCIES, MISTAKE, Agreement, Row
from megatron_bp.tools.convert.families import HuggingFace
from megatron_bp.tools.convert.folder import INDEX
from megatron_bp.tools.convert.refused import ConvertError
from megatron_bp.tools.convert.weights import Heads, joined, separated


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def there_and_back(rank: int, world: int, name: str, base: str) -> dict[str, Any]:
    """Import a tiny model, check it, export it; what is left in files is looked at outside."""
    from megatron_bp.tools.convert.checking import check_folder
    from megatron_bp.tools.convert.exporting import export_folder
    from megatron_bp.tools.convert.importing import import_folder

    folder, checkpoint = Path(base) / "folder", Path(base) / "checkpoint"
    save_tiny(name, folder)
    if name == NVIDIAS:
        as_nvidia_publishes(folder)
    import_folder(folder, checkpoint, quiet=True)
    found = check_folder(folder, checkpoint)
    like, out = checkpoint / "hugging_face", Path(base) / "out"
    export_folder(like, checkpoint, out, shard_bytes=30_000, quiet=True)
    return {
        "told": found.told(),
        "starts": [row.start for row in found.rows],
        "holds": found.holds,
        "with transformers' own angles": found.rows[0].as_it_is,
    }


@pytest.mark.parametrize("name", list(MODELS))
def test_logits_agree_and_the_way_back_is_bitwise(name: str, tmp_path: Path) -> None:
    (found,) = run_ranks(1, there_and_back, name, str(tmp_path))
    assert found["holds"], found["told"]
    assert found["with transformers' own angles"] < 2e-5, found["told"]  # up to position 1023
    assert found["starts"] == [0, 8160, 16352, 131040, 524224, 1048512]
    before, after = tensors_of(tmp_path / "folder"), tensors_of(tmp_path / "out")
    before = {as_ministral3(key): tensor for key, tensor in before.items()}
    assert sorted(before) == sorted(after)
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key
        assert tensor.dtype == after[key].dtype
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())
    assert {file.stat().st_mode for file in files} == {(tmp_path / "out" / INDEX).stat().st_mode}
    was, now = (
        json.loads((tmp_path / where / "config.json").read_text()) for where in ("folder", "out")
    )
    assert now == (was if name != NVIDIAS else now)
    assert now["model_type"] == name.partition(",")[0]
    assert not {"auto_map", "block_size"} & set(now)
    assert now.get("mask_token_id") == was.get("mask_token_id")


def with_swaps(rank: int, world: int, name: str, base: str) -> dict[str, float]:
    """How far logits are off if the model is filled from a folder whose weights were swapped."""
    from megatron_bp.tools.convert import checking
    from megatron_bp.tools.convert.folder import WeightFolder
    from megatron_bp.tools.convert.importing import import_folder
    from megatron_bp.tools.convert.model import one_process
    from megatron_bp.tools.convert.saved import saved

    folder, checkpoint = Path(base) / "folder", Path(base) / "checkpoint"
    save_tiny(name, folder)
    model = import_folder(folder, checkpoint, quiet=True)
    rows = [(0, torch.arange(64))]
    (true,), _, frequencies = checking._theirs(WeightFolder(folder), model, rows)
    apart = {}
    for how in ("nothing", *SWAPS):
        other = Path(base) / how
        shutil.copytree(folder, other)
        if how != "nothing":
            change(other, how)
        fill = partial(fill_directly, model, tensors_of(other))
        with one_process(), mock.patch.object(checking, "load", fill):
            (found,), _ = checking._ours(saved(model, checkpoint), rows, frequencies)
        apart[how] = checking.distance(found, true)
    return apart


def fill_directly(model: Any, tensors: dict[str, torch.Tensor], network: Any, _: Any) -> None:
    state = {
        weight.name: joined(weight.kind, [tensors[s] for s in weight.sources], model.heads)
        for weight in model.weights
    }
    network.load_state_dict(state, strict=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_swapped_weights_are_found(name: str, tmp_path: Path) -> None:
    (apart,) = run_ranks(1, with_swaps, name, str(tmp_path))
    assert apart.pop("nothing") < 1e-5
    assert set(apart) == set(SWAPS)
    assert min(apart.values()) > MISTAKE, apart
    assert not any(Row(0, 64, far, 0.0).holds for far in apart.values())


@pytest.mark.parametrize(
    ("row", "frequencies", "holds", "words"),
    [
        (Row(0, 64, 1e-5, 1e-3), FREQUENCIES, True, "are the same model"),
        (Row(0, 64, 2e-5, 0.0), FREQUENCIES, False, "--tolerance 1e-04"),
        (Row(0, 64, 2e-5, 0.0, 1e-4), FREQUENCIES, True, "are the same model"),
        (Row(0, 64, 0.0, 2e-3), FREQUENCIES, False, "--tolerance 1e-04"),
        (Row(1 << 17, 64, 0.0, 2e-3), FREQUENCIES, True, "are the same model"),
        (Row(0, 64, MISTAKE, 0.0), FREQUENCIES, False, "are NOT the same model"),
        (Row(0, 64, 0.0, 0.0), 2 * FREQUENCIES, False, "are NOT the same model"),
        (Row(0, 64, float("nan"), 0.0), FREQUENCIES, False, "are NOT the same model"),
        (Row(0, 64, 0.0, float("nan")), FREQUENCIES, False, "are NOT the same model"),
    ],
)
def test_what_is_allowed_and_told(row: Row, frequencies: float, holds: bool, words: str) -> None:
    found = Agreement([Row(0, 64, 0.0, 0.0), row], frequencies)
    assert found.holds == holds
    assert words in found.told().splitlines()[-1]
    assert not Agreement([], 0.0).holds


def test_a_bf16_folder_stays_bf16(tmp_path: Path) -> None:
    run_ranks(1, bf16_there_and_back, str(tmp_path))
    before, after = tensors_of(tmp_path / "folder"), tensors_of(tmp_path / "out")
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())


def bf16_there_and_back(rank: int, world: int, base: str) -> None:
    from megatron_bp.tools.convert.exporting import export_folder
    from megatron_bp.tools.convert.importing import import_folder

    save_tiny("qwen3", Path(base) / "folder", torch.bfloat16)
    import_folder(Path(base) / "folder", Path(base) / "checkpoint", quiet=True)
    like = Path(base) / "folder"
    export_folder(like, Path(base) / "checkpoint", Path(base) / "out", quiet=True)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe, a dense layer"])
def test_layers_of_transformer_engine_have_their_names(name: str, tmp_path: Path) -> None:
    """What the local layers lack is in an import; what only Transformer Engine writes is read."""
    (found,) = run_ranks(1, as_transformer_engine_has_it, name, str(tmp_path))
    layers = "decoder.layers"
    if name == "qwen3":
        norms = {f"{layers}.self_attention.{part}_layernorm" for part in "qk"}
        extra = {f"{norm}._extra_state/shard_{layer}_3" for norm in norms for layer in range(3)}
    else:  # layers are not alike: each has its own keys
        norms = {f"{layers}.{n}.self_attention.{part}_layernorm" for part in "qk" for n in range(3)}
        norms |= {f"{layers}.{layer}.pre_mlp_layernorm" for layer in (0, 2)}
        assert {f"{layers}.{layer}.pre_mlp_layernorm.weight" for layer in (0, 2)} <= found["keys"]
        assert f"{layers}.1.pre_mlp_layernorm.weight" not in found["keys"]
        extra = {f"{norm}._extra_state/shard_0_1" for norm in norms}
    extra.add("decoder.final_layernorm._extra_state/shard_0_1")
    assert extra <= found["keys"], sorted(extra - found["keys"])
    assert found["holds"], found["told"]
    before, after = tensors_of(tmp_path / "folder"), tensors_of(tmp_path / "out")
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())


def as_transformer_engine_has_it(rank: int, world: int, name: str, base: str) -> dict[str, Any]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    from megatron_bp.tools.convert import importing, te
    from megatron_bp.tools.convert.checking import check_folder
    from megatron_bp.tools.convert.exporting import export_folder

    folder, theirs = Path(base) / "folder", Path(base) / "theirs"
    save_tiny(name, folder)
    importing.import_folder(folder, Path(base) / "both", quiet=True)

    def only_theirs(state: dict[str, Any]) -> dict[str, Any]:
        found = te.with_both(state)
        return {n: value[1] if isinstance(value, list) else value for n, value in found.items()}

    with mock.patch.object(importing, "with_both", only_theirs):
        importing.import_folder(folder, theirs, quiet=True)
    export_folder(folder, theirs, Path(base) / "out", quiet=True)
    found = check_folder(folder, theirs)
    keys = FileSystemReader(Path(base) / "both" / "release").read_metadata().state_dict_metadata
    return {"keys": set(keys), "holds": found.holds, "told": found.told()}


def test_another_config_is_refused_by_name(tmp_path: Path) -> None:
    (message,) = run_ranks(1, other_config, str(tmp_path))
    assert "--query-scale-beta was 0.1, is 0.2 (config.json)" in message


def other_config(rank: int, world: int, base: str) -> str:
    from megatron_bp.tools.convert.exporting import export_folder
    from megatron_bp.tools.convert.importing import import_folder

    folder = Path(base) / "folder"
    save_tiny("ministral3", folder)
    import_folder(folder, Path(base) / "checkpoint", quiet=True)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["llama_4_scaling_beta"] = 0.2
    (folder / "config.json").write_text(json.dumps(config))
    try:
        export_folder(folder, Path(base) / "checkpoint", Path(base) / "out", quiet=True)
    except ConvertError as error:
        return str(error)
    return ""


def test_padding_of_a_runs_table_is_not_exported(tmp_path: Path) -> None:
    run_ranks(1, padded_there_and_back, str(tmp_path))
    before, after = tensors_of(tmp_path / "padded"), tensors_of(tmp_path / "out")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert len(before[name]) == VOCABULARY + 6
        assert torch.equal(after[name], before[name][:VOCABULARY])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == VOCABULARY


def padded_there_and_back(rank: int, world: int, base: str) -> None:
    """A checkpoint with more rows than ids, as a run has them, into a folder without."""
    from megatron_bp.tools.convert.exporting import export_folder
    from megatron_bp.tools.convert.importing import import_folder

    padded, like, checkpoint = (Path(base) / name for name in ("padded", "like", "checkpoint"))
    save_tiny("qwen3", padded, vocabulary=VOCABULARY + 6)
    shutil.copytree(padded, like)
    ids = {"model": {"vocab": {str(number): number for number in range(VOCABULARY)}}}
    (padded / "tokenizer.json").write_text(json.dumps(ids))
    config = json.loads((like / "config.json").read_text()) | {"vocab_size": VOCABULARY}
    (like / "config.json").write_text(json.dumps(config))
    import_folder(padded, checkpoint, quiet=True)
    export_folder(like, checkpoint, Path(base) / "out", quiet=True)


def test_queries_keys_and_values_group_by_group() -> None:
    heads = Heads(queries=4, groups=2, channels=1)
    q, k, v = (torch.tensor(rows) for rows in ([0, 1, 2, 3], [10, 11], [20, 21]))
    whole = joined("qkv", [q, k, v], heads)
    assert whole.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    for part, back in zip((q, k, v), separated("qkv", whole, heads), strict=True):
        assert torch.equal(part, back)


def test_gate_above_up() -> None:
    heads = Heads(1, 1, 1)
    gate, up = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
    whole = joined("stack", [gate, up], heads)
    assert whole.flatten().tolist() == [1, 2, 3, 4]
    assert [part.flatten().tolist() for part in separated("stack", whole, heads)] == [
        [1, 2],
        [3, 4],
    ]


NEMOTRON: dict[str, Any] = {
    "model_type": "ministral3",
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


NAN = float("nan")
ROPE = {"rope_type": "default", "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


def test_flags_of_ministral3() -> None:
    flags = HuggingFace(NEMOTRON).flags
    assert flags["position_embedding_type"] == "yarn"
    assert (flags["query_scale_beta"], flags["query_scale_length"]) == (0.1, 16384)
    assert (flags["mscale"], flags["mscale_all_dim"]) == (1.0, 1.0)
    assert flags["rotary_scaling_factor"] == 16.0
    assert flags["untie_embeddings_and_output_weights"]
    assert flags["norm_epsilon"] == 1e-5


def test_flags_of_qwen() -> None:
    two = {"model_type": "qwen2", "num_hidden_layers": 3, "num_attention_heads": 4}
    two |= {"hidden_size": 64, "use_sliding_window": True, "sliding_window": 8}
    two["num_key_value_heads"] = 2
    flags = HuggingFace(two | {"max_window_layers": 2}).flags
    assert flags["add_qkv_bias"]
    assert (flags["window_size"], flags["window_attn_skip_freq"]) == ("(7,0)", "[0]*2+[1]*1")
    assert flags["kv_channels"] == 16
    moe = HuggingFace({"model_type": "qwen3_moe", "norm_topk_prob": False}).flags
    assert moe["moe_router_pre_softmax"]
    assert moe["qk_layernorm"]
    assert "add_qkv_bias" not in moe


@pytest.mark.parametrize("name", FAMILIES)
def test_every_number_has_a_place(name: str) -> None:
    """The names are those of transformers' own class, each once, as its meta model has them."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[name]()
    config.num_hidden_layers = 2
    if hasattr(config, "layer_types"):
        config.layer_types = config.layer_types[:2]
    if name == "qwen3_moe":
        config.num_experts, config.num_experts_per_tok = 3, 2
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    want = [key for key, _ in model.named_parameters()]
    found = [
        source for weight in HuggingFace(config.to_dict()).weights for source in weight.sources
    ]
    assert len(found) == len(set(found))
    if name == "qwen3_moe":  # in memory experts are stacked, on disk one after the other
        want = [key for key in want if ".experts." not in key]
        experts = [source for source in found if ".experts." in source]
        assert len(experts) == 2 * 3 * 3
        found = [source for source in found if source not in experts]
    assert sorted(found) == sorted(want)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "qwen3_5_moe"}, "hybrid"),
        ({"model_type": "qwen3_next"}, "hybrid"),
        ({"model_type": "gemma3"}, "Gemma"),
        ({"model_type": "diffusion_gemma"}, "DiffusionGemma"),
        ({"model_type": "llada2_moe"}, "LLaDA2"),
        ({"model_type": "gemma4", "text_config": {}}, "Gemma"),
        ({"model_type": "qwen3_5", "text_config": {}}, "hybrid"),
        ({"model_type": "diffusion_gemma", "text_config": {}}, "DiffusionGemma"),
        ({"model_type": "mistral3", "vision_config": {}}, "mistral3.*vision_config"),
        ({"model_type": "sdar"}, "sdar: is none of"),
        ({"model_type": "llama", "num_hidden_layers": 10**9}, "num_hidden_layers 1000000000"),
        ({"model_type": "llama", "hidden_size": "x"}, "hidden_size 'x'"),
        ({"model_type": "llama", "num_key_value_heads": 0}, "num_key_value_heads 0"),
        (
            {"model_type": "llama", "rope_theta": float("inf")},
            "rope_theta inf.* number of 2 to 1e",
        ),
        ({"model_type": "llama", "rope_parameters": ROPE | {"rope_theta": "1e4"}}, "theta '1e4'"),
        ({"model_type": "llama", "rope_parameters": ROPE | {"rope_theta": 0.0}}, "rope_theta 0.0"),
        ({"model_type": "llama", "rope_scaling": LINEAR | {"factor": NAN}}, "scaling: factor nan"),
        ({"model_type": "llama", "rope_scaling": LINEAR | {"factor": -2}}, "factor -2"),
        ({"model_type": "llama", "rope_scaling": LINEAR | {"factor": True}}, "factor True"),
        ({"model_type": "llama", "rms_norm_eps": NAN}, "rms_norm_eps nan.* 1e-30 to 1"),
        ({"model_type": "llama", "rms_norm_eps": 0}, "rms_norm_eps 0"),
        ({"model_type": "mistral", "sliding_window": 10**30}, "sliding_window 1000"),
        ({"model_type": "mistral", "sliding_window": 7.0}, "sliding_window 7.0.* whole number"),
        (
            {
                "model_type": "ministral3",
                "rope_parameters": NEMOTRON["rope_parameters"] | {"llama_4_scaling_beta": -0.1},
            },
            "llama_4_scaling_beta -0.1",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok 5: has to be at most num_experts, 4",
        ),
        ({"model_type": "llama", "quantization_config": {}}, "quantization_config"),
        ({"model_type": "gpt2"}, "none of llama, mistral"),
        ({}, "model_type None"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act gelu"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias"),
        (
            {
                "model_type": "llama",
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            },
            "rope_type dynamic",
        ),
        (
            {
                "model_type": "llama",
                "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 1.5},
            },
            "factor 1.5",
        ),
        (
            {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 3},
            "must divide",
        ),
        ({"model_type": "llama", "num_attention_heads": 6}, "transformers cannot read it"),
    ],
)
def test_models_that_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConvertError, match=words):
        HuggingFace(values)
