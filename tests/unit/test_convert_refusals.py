"""What cannot be imported or exported leaves nothing, or what is told; nothing is overwritten."""

import dataclasses
import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny import save_tiny
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from megatron_bp.tools.convert.refused import ConvertError
from megatron_bp.tools.convert.writing import writing

LAYER = "model.layers.1."
Q, K, V = (f"{LAYER}self_attn.{part}_proj.weight" for part in "qkv")
GATE, UP, DOWN = (f"{LAYER}mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def rows(**counts: int) -> Callable[[Path], None]:
    """Other rows of tensors, which together are as many as before."""
    names = {"q": Q, "k": K, "v": V, "gate": GATE, "up": UP}
    return tensors(
        {
            names[name]: lambda _, count=count: torch.ones(count, 32)
            for name, count in counts.items()
        }
    )


def tensors(changes: dict[str, Callable[[Tensor], Tensor]]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        for name, of in changes.items():
            held[name] = of(held[name]).contiguous()
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def tied(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))


def linked(folder: Path) -> None:
    (folder.parent / "elsewhere").touch()
    (folder / "tokenizer_config.json").symlink_to(folder.parent / "elsewhere")


# Mistake -> how it is made in a folder of a Llama, and words of the refusal.
MISTAKES: dict[str, tuple[Callable[[Path], None], str]] = {
    "q as k": (rows(q=16, k=32), "q_proj.weight is [16, 32]; config.json makes it [32, 32]"),
    "k and v": (rows(k=24, v=8), "k_proj.weight is [24, 32]; config.json makes it [16, 32]"),
    "gate": (rows(gate=56, up=40), "gate_proj.weight is [56, 32]; config.json makes it [48, 32]"),
    "down": (tensors({DOWN: lambda x: x.T}), "down_proj.weight is [48, 32]"),
    "two types": (tensors({K: lambda x: x.half()}), "of the types torch.float16, torch.float32"),
    "two types of layers": (tensors({DOWN: lambda x: x.half()}), "save the folder in one type"),
    "whole numbers": (tensors({DOWN: lambda x: x.int()}), "down_proj.weight is I32"),
    "tied": (tied, "lm_head.weight is not model.embed_tokens.weight"),
    "linked": (linked, "outside of the folder"),
}
NOT_A_NUMBER = tensors({K: lambda x: x.index_fill(0, torch.tensor([3]), float("nan"))})


def refused(what: Callable[[], Any]) -> str:
    try:
        what()
    except ConvertError as error:
        return str(error)
    return "nothing was refused"


def left(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def imports(rank: int, world: int, base: str) -> dict[str, Any]:
    from megatron_bp.tools.convert import importing
    from megatron_bp.tools.convert.checking import check_folder

    good, target = Path(base) / "good", Path(base) / "checkpoint"
    save_tiny("llama", good)
    found: dict[str, Any] = {}
    for name, (mistake, _) in MISTAKES.items():
        folder = Path(base) / name
        shutil.copytree(good, folder)
        mistake(folder)
        words = refused(lambda folder=folder: importing.import_folder(folder, target, quiet=True))
        found[name] = words, target.exists()

    def again(source: Path = good) -> str:
        return refused(lambda: importing.import_folder(source, target, quiet=True))

    bad = Path(base) / "bad"
    shutil.copytree(good, bad)
    NOT_A_NUMBER(bad)
    found["not a number"] = again(bad), left(target)
    found["after it"] = again(), left(target)
    shutil.rmtree(target)
    with mock.patch.object(importing.yaml, "safe_dump", side_effect=OSError(28, "No space")):
        found["no space"] = again(), left(target)
    (target / "release").rename(Path(base) / "release")
    (target / "model.yaml").write_text("mine")
    found["of somebody"] = again(), left(target)
    (target / "model.yaml").unlink()
    same = Path(base) / "same"  # a tied model's folder that has the table twice
    shutil.copytree(good, same)
    tied(same)
    held = load_file(same / "model.safetensors")
    tensors({HEAD: lambda _: held[EMBEDDING].clone()})(same)
    found["the same head"] = again(same), left(target)
    found["a checkpoint"] = again(same), left(target)
    MISTAKES["down"][0](same)
    found["check"] = refused(lambda: check_folder(same, target)), None
    return found


def test_imports_that_are_refused(tmp_path: Path) -> None:
    (found,) = run_ranks(1, imports, str(tmp_path))
    for name, (_, words) in MISTAKES.items():
        assert words in found[name][0], name
        assert not found[name][1], name
    for name, words, held in (
        ("not a number", f"{K} holds NaN", ["release"]),
        ("after it", "unfinished import; delete release in it", ["release"]),
        ("no space", "GB are free there", ["release"]),
        ("of somebody", "has model.yaml already", ["model.yaml"]),
        ("the same head", "nothing was refused", WHOLE),
        ("a checkpoint", "holds a checkpoint already", WHOLE),
    ):
        assert words in found[name][0], name
        assert found[name][1] == held, name
    assert "unfinished import; delete release, model.yaml" in found["not a number"][0]
    assert "transformers cannot load it" in found["check"][0]


WHOLE = ["hugging_face", "latest_checkpointed_iteration.txt", "model.yaml", "release"]


def exports(rank: int, world: int, base: str) -> dict[str, tuple[str, list[str]]]:
    from megatron_bp.tools.convert import exporting
    from megatron_bp.tools.convert.importing import import_folder

    folder, checkpoint, target = (Path(base) / name for name in ("folder", "checkpoint", "out"))
    save_tiny("llama", folder)
    import_folder(folder, checkpoint, quiet=True)
    target.mkdir()

    def again() -> tuple[str, list[str]]:
        made = refused(
            lambda: exporting.export_folder(
                folder, checkpoint, target, shard_bytes=30_000, quiet=True
            )
        )
        return made, left(target)

    def with_self_conditioning(*what: Any) -> Any:
        found = exporting_saved(*what)
        was = Namespace(**vars(found.was) | {"self_conditioning": 1})
        return dataclasses.replace(found, was=was)

    exporting_saved, found = exporting.saved, {}
    with mock.patch.object(exporting, "saved", with_self_conditioning):
        found["self-conditioning"] = again()
    full = SafetensorError("No space left on device")
    with mock.patch.object(exporting, "save_file", side_effect=[None, full]):
        found["no space"] = again()
    found["after it"] = again()
    for file in target.iterdir():
        file.unlink()
    (target / "notes").write_text("mine")
    found["not empty"] = again()
    (target / "notes").unlink()
    found["whole"] = again()
    found["a second time"] = again()
    return found


def test_exports_that_are_refused(tmp_path: Path) -> None:
    (found,) = run_ranks(1, exports, str(tmp_path))
    words, held = found["self-conditioning"]
    assert "a module for self-conditioning" in words
    assert not held
    words, held = found["no space"]
    assert "cannot be written (No space left on device)" in words
    assert "config.json" not in held
    assert held
    assert "holds an unfinished export" in words
    assert "holds an unfinished export" in found["after it"][0]
    assert found["after it"][1] == held
    assert "is not empty" in found["not empty"][0]
    assert found["not empty"][1] == ["notes"]
    assert found["whole"][0] == "nothing was refused"
    assert "config.json" in found["whole"][1]
    assert "is not empty" in found["a second time"][0]
    assert found["a second time"][1] == found["whole"][1]


FULL = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")


@pytest.mark.parametrize("error", [OSError(28, "x"), SafetensorError("x"), FULL])
@pytest.mark.parametrize("wrapped", [True, False])
def test_what_cannot_be_written_is_told(tmp_path: Path, error: Exception, wrapped: bool) -> None:
    raised = CheckpointException("write", {0: _wrap_exception(error)}) if wrapped else error
    with pytest.raises(ConvertError, match=r"cannot be written .* GB are free there\. It is bad"):
        raise_in(tmp_path, raised)


@pytest.mark.parametrize("error", [RuntimeError("a mistake"), ValueError("a mistake")])
def test_other_errors_stay_what_they_are(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error), match=r"^a mistake$"):
        raise_in(tmp_path, error)
    with pytest.raises(type(error), match=r"^a mistake$"):
        raise_in(tmp_path, CheckpointException("write", {0: _wrap_exception(error)}))


def raise_in(folder: Path, error: BaseException) -> None:
    with writing(folder, "It is bad"):
        raise error
