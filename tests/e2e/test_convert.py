"""Hugging Face models are imported, trained under CSBP, exported, and are the same models again.

All are imported in one process and exported in one, which imports what they need once.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from entry import pretrain
from launch import make_data
from ranks import run_ranks
from safetensors.torch import load_file
from tiny import FAMILIES, save_tiny

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

CSBP = ["--tensor-model-parallel-size", "2", "--block-parallel-size", "2"]
EXPERTS = ["--sequence-parallel", "--expert-model-parallel-size", "2"]
# Name -> family, ranks, layout.
CASES: dict[str, tuple[str, int, list[str]]] = {
    **{name: (name, 4, CSBP) for name in FAMILIES},
    "qwen3_moe": ("qwen3_moe", 4, [*CSBP, *EXPERTS]),
    "qwen2, pp 3": ("qwen2", 3, ["--pipeline-model-parallel-size", "3"]),
}


def start(rank: int, world: int, base: str) -> None:
    from megatron_bp.tools.convert.importing import import_folder

    for case, (family, _, _) in CASES.items():
        save_tiny(family, Path(base) / case / "folder")
        import_folder(Path(base) / case / "folder", Path(base) / case / "imported", quiet=True)


def train(case: str, base: Path, head: list[str]) -> None:
    _, ranks, layout = CASES[case]
    config = base / case / "converted.yaml"
    config.write_text(f"include: [{head[0]}, imported/model.yaml]\n")
    arguments = [str(config), *head[1:], "--pretrained-checkpoint", str(base / case / "imported")]
    arguments += ["--save", str(base / case / "run"), "--train-iters", "3", "--save-interval", "3"]
    ends = run_ranks(ranks, pretrain, [*arguments, *layout], fresh=True, timeout=240)
    assert [code for code, _ in ends] == [0] * ranks, f"{case}: {ends[0][1]}"


def end(rank: int, world: int, base: str) -> dict[str, tuple[bool, str]]:
    """Of each case, whether the trained model is its export by transformers, and in words."""
    from megatron_bp.tools.convert.checking import check_folder
    from megatron_bp.tools.convert.exporting import export_folder

    found = {}
    for case in CASES:
        folder, run, out = (Path(base) / case / name for name in ("folder", "run", "out"))
        export_folder(folder, run, out, quiet=True)
        same = check_folder(out, run)
        found[case] = same.holds, same.told()
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    base = tmp_path_factory.mktemp("convert")
    run_ranks(1, start, str(base), timeout=240)
    head = make_data(base / "data")
    for case in CASES:
        train(case, base, head)
    (found,) = run_ranks(1, end, str(base), timeout=240)
    return base, found


@pytest.mark.parametrize("case", list(CASES))
def test_trained_and_exported(case: str, trained: tuple[Path, dict[str, Any]]) -> None:
    base, found = trained
    holds, told = found[case]
    assert holds, told
    before, after = (
        load_file(base / case / name / "model.safetensors") for name in ("folder", "out")
    )
    assert before.keys() == after.keys()
    still = [name for name, tensor in before.items() if torch.equal(tensor, after[name])]
    assert not still, "every weight is trained"
    config = json.loads((base / case / "out" / "config.json").read_text())
    assert config["mask_token_id"] == 257
    assert config["block_diffusion"]["diffusion_block_size"] == 4
    assert config["block_diffusion"]["clean_relation"] == "block"
    card = (base / case / "out" / "README.md").read_text()
    assert "mask token (id 257)" in card
    assert "| `diffusion_block_size` | `4` |" in card
