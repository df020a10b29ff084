"""A Hugging Face model is imported, trained under CSBP, exported, and is the same model again."""

import json
from pathlib import Path
from typing import Any

import pytest
from entry import pretrain
from launch import make_data
from ranks import run_ranks
from tiny import FAMILIES, save_tiny

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

LAYOUTS = {
    "tp 2, bp 2": (4, ["--tensor-model-parallel-size", "2", "--block-parallel-size", "2"]),
    "pp 3": (3, ["--pipeline-model-parallel-size", "3"]),
    "ep 2": (2, ["--block-parallel-size", "2", "--expert-model-parallel-size", "2"]),
}
CASES = [(name, "tp 2, bp 2") for name in FAMILIES] + [
    ("qwen2", "pp 3"),
    ("qwen3_moe", "ep 2"),
]


def start(rank: int, world: int, name: str, base: str) -> None:
    from megatron_bp.tools.convert.importing import import_folder

    save_tiny(name, Path(base) / "folder")
    import_folder(Path(base) / "folder", Path(base) / "imported", quiet=True)


def end(rank: int, world: int, base: str) -> dict[str, Any]:
    """The trained model against its export, and against what it started from."""
    from megatron_bp.tools.convert.checking import check_folder
    from megatron_bp.tools.convert.exporting import export_folder

    folder, run, out = (Path(base) / name for name in ("folder", "run", "out"))
    export_folder(folder, run, out, quiet=True)
    same = check_folder(out, run)
    return {"told": same.told(), "same": same.holds, "moved": not check_folder(folder, run).holds}


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_trained_and_exported(name: str, layout: str, tmp_path: Path) -> None:
    run_ranks(1, start, name, str(tmp_path))
    head = make_data(tmp_path / "data")
    config = tmp_path / "data" / "converted.yaml"
    config.write_text(f"include: [{head[0]}, {tmp_path / 'imported' / 'model.yaml'}]\n")
    ranks, flags = LAYOUTS[layout]
    flags = [*flags, "--sequence-parallel"] if (name, ranks) == ("qwen3_moe", 4) else flags
    arguments = [str(config), *head[1:], "--pretrained-checkpoint", str(tmp_path / "imported")]
    arguments += ["--save", str(tmp_path / "run"), "--train-iters", "3", "--save-interval", "3"]
    ends = run_ranks(ranks, pretrain, [*arguments, *flags], fresh=True, timeout=240)
    assert [code for code, _ in ends] == [0] * ranks, ends[0][1]
    (found,) = run_ranks(1, end, str(tmp_path))
    assert found["same"], found["told"]
    assert found["moved"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["mask_token_id"] == 257
    assert config["block_diffusion"]["diffusion_block_size"] == 4
    assert config["block_diffusion"]["clean_relation"] == "block"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "mask token (id 257)" in card
    assert "| `diffusion_block_size` | `4` |" in card
