"""Hugging Face folders that are not to be trusted, or are not whole."""

import json
import pickle
import struct
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny import save_tiny

from megatron_bp.tools.convert import command
from megatron_bp.tools.convert.exporting import _with_mask, table_rows, text_files
from megatron_bp.tools.convert.families import HuggingFace
from megatron_bp.tools.convert.folder import INDEX, SINGLE, Folder, WeightFolder
from megatron_bp.tools.convert.importing import true_ids
from megatron_bp.tools.convert.matching import same_names
from megatron_bp.tools.convert.refused import ConvertError
from megatron_bp.tools.convert.tokens import tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tensors in two files, with an index."""
    path = tmp_path / "folder"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    for name, value in (("a", 1.0), ("b", 2.0)):
        save_file({name: torch.full((2, 3), value)}, path / f"{name}.safetensors")
    index(path, {"a": "a.safetensors", "b": "b.safetensors"})
    return path


def index(path: Path, where: dict[str, Any]) -> None:
    (path / INDEX).write_text(json.dumps({"weight_map": where}))


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_tensors_one_at_a_time(folder: Path) -> None:
    found = WeightFolder(folder)
    assert found.names == {"a", "b"}
    assert found.shape("b") == (2, 3)
    assert found.dtype("b") == torch.float32
    assert found.tensor("b").tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize("name", ["../a.safetensors", "sub/a.safetensors", "..", ".", "", 3, None])
def test_a_name_that_leads_elsewhere(folder: Path, name: Any) -> None:
    (folder / "sub").mkdir()
    for place in (folder.parent, folder / "sub"):
        save_file({"a": torch.zeros(1)}, place / "a.safetensors")
    index(folder, {"a": name, "b": "b.safetensors"})
    with pytest.raises(ConvertError, match=r"only plain names|has no"):
        WeightFolder(folder)


def test_an_absolute_name(folder: Path) -> None:
    outside = folder.parent / "a.safetensors"
    save_file({"a": torch.zeros(1)}, outside)
    index(folder, {"a": str(outside), "b": "b.safetensors"})
    with pytest.raises(ConvertError, match="only plain names"):
        WeightFolder(folder)


@pytest.mark.parametrize("name", ["a.safetensors", INDEX, "config.json"])
def test_a_link_out_of_the_folder(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent / "kept")
    (folder / name).symlink_to(folder.parent / "kept")
    with pytest.raises(ConvertError, match="outside of the folder"):
        WeightFolder(folder)


def test_a_link_inside_the_folder_is_read(folder: Path) -> None:
    (folder / "a.safetensors").rename(folder / "kept.safetensors")
    (folder / "a.safetensors").symlink_to("kept.safetensors")
    assert WeightFolder(folder).tensor("a").sum() == 6


@pytest.mark.parametrize(
    ("kept", "held"), [("blobs", True), ("others", False), ("snapshots/main", False)]
)
def test_links_of_the_hubs_cache(folder: Path, tmp_path: Path, kept: str, held: bool) -> None:
    """A snapshot's files are links to the blobs of the same model, and to nothing else."""
    model = tmp_path / "models--owner--name"
    snapshot = model / "snapshots" / "c0ffee"
    (model / kept).mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(folder.iterdir()):
        file.rename(model / kept / str(number))
        (snapshot / file.name).symlink_to(f"../../{kept}/{number}")
    if held:
        assert WeightFolder(snapshot).tensor("a").sum() == 6
    else:
        with pytest.raises(ConvertError, match="outside of the folder"):
            WeightFolder(snapshot)


@pytest.mark.parametrize("how", ["alone", "in the index", "named safetensors"])
def test_no_pickle_is_executed(folder: Path, how: str) -> None:
    mark = folder.parent / "executed"
    name = "a.safetensors" if how == "named safetensors" else "pytorch_model.bin"
    (folder / name).write_bytes(pickle.dumps(Payload(mark)))
    if how == "alone":
        (folder / INDEX).unlink()
    if how == "in the index":
        index(folder, {"a": name, "b": "b.safetensors"})
    words = {
        "alone": "pytorch_model.bin may run code",
        "in the index": "only .safetensors files are read",
        "named safetensors": "no whole safetensors file",
    }[how]
    with pytest.raises(ConvertError, match=words):
        WeightFolder(folder)
    assert not mark.exists()
    pickle.loads((folder / name).read_bytes())  # the payload itself works
    assert mark.exists()


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ({"a": "a.safetensors"}, None),  # b.safetensors is not named: not read
        ({"a": "b.safetensors", "b": "a.safetensors"}, "does not say what the files hold"),
        ({"a": "a.safetensors", "c": "b.safetensors"}, "does not say what the files hold"),
        ({"a": "gone.safetensors"}, "has no gone.safetensors"),
        ([], "has no weight_map"),
    ],
)
def test_an_index_that_is_wrong(folder: Path, where: Any, words: str | None) -> None:
    index(folder, where)
    if words is None:
        assert WeightFolder(folder).names == {"a"}
        return
    with pytest.raises(ConvertError, match=words):
        WeightFolder(folder)


def test_a_tensor_twice(folder: Path) -> None:
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, folder / "b.safetensors")
    with pytest.raises(ConvertError, match=r"a is in a.safetensors and in b.safetensors"):
        WeightFolder(folder)


def test_what_else_is_refused(folder: Path) -> None:
    save_file({"a": torch.zeros(1, dtype=torch.int8)}, folder / "a.safetensors")
    with pytest.raises(ConvertError, match="a is I8"):
        WeightFolder(folder).dtype("a")
    save_file({"a": torch.zeros(1)}, folder / SINGLE)
    with pytest.raises(ConvertError, match="delete the one not meant"):
        WeightFolder(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConvertError, match="holds an adapter"):
        WeightFolder(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ConvertError, match="holds a list"):
        Folder(folder)
    with pytest.raises(ConvertError, match="is no folder"):
        Folder(folder / "gone")


def test_a_file_that_ends_early(folder: Path) -> None:
    whole = (folder / "a.safetensors").read_bytes()
    (folder / "a.safetensors").write_bytes(whole[:-1])
    with pytest.raises(ConvertError, match="no whole safetensors file"):
        WeightFolder(folder)


def test_names_are_the_familys(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    folder = WeightFolder(tmp_path)
    model = HuggingFace(folder.config)
    same_names(folder, model)
    fewer = HuggingFace(folder.config | {"num_hidden_layers": 2, "layer_types": None})
    with pytest.raises(ConvertError, match=r"has model\.layers\.2\..*which is not converted"):
        same_names(folder, fewer)
    more = HuggingFace(folder.config | {"num_hidden_layers": 4, "layer_types": None})
    with pytest.raises(ConvertError, match=r"lacks model\.layers\.3\."):
        same_names(folder, more)


def test_true_ids_are_the_tokenizers(folder: Path) -> None:
    model = HuggingFace({"model_type": "llama", "vocab_size": 10})
    assert true_ids(Folder(folder), model) == 10
    tokenizer = {"model": {"vocab": {"x": 0, "y": 4}}, "added_tokens": [{"id": 6, "content": "m"}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert true_ids(Folder(folder), model) == 7
    assert tokens(Folder(folder)) == {0: "x", 4: "y", 6: "m"}
    with pytest.raises(ConvertError, match="7 ids and its table 6 rows"):
        true_ids(Folder(folder), HuggingFace({"model_type": "llama", "vocab_size": 6}))


def test_the_mask_token_is_named(folder: Path) -> None:
    tokenizer = {"model": {"vocab": {"x": 0}}}
    tokenizer["added_tokens"] = [{"id": 6, "content": "<|mask|>"}, {"id": 7, "content": "y"}]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    settings, note = _with_mask(Folder(folder), 6)
    assert settings == {"eos_token": "x", "mask_token": "<|mask|>"}
    assert note is None
    with pytest.raises(ConvertError, match="has no id 5, the mask token's"):
        _with_mask(Folder(folder), 5)


def test_texts_are_the_tokenizers_and_generation_is_the_models(
    folder: Path, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "modeling.py"):
        (tokenizer / name).write_text("{}")
    own = Folder(tokenizer, config=False)
    names = ["chat_template.jinja", "tokenizer.json"]
    assert sorted(text_files(Folder(folder), own)) == names
    (folder / "generation_config.json").write_text("{}")
    (folder / "merges.txt").write_text("")
    found = text_files(Folder(folder), own)
    assert sorted(found) == [names[0], "generation_config.json", names[1]]
    assert found["generation_config.json"].parent == folder
    assert found["tokenizer.json"].parent == tokenizer
    (tokenizer / "merges.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(ConvertError, match=r"has no merges\.txt"):
        text_files(Folder(folder), own)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"model": null}',
        '{"model": {"vocab": {"x": "y"}}}',
        '{"model": {"vocab": {"x": -7}}}',
        '{"model": {"vocab": [5]}}',
        '{"added_tokens": [{"content": "x"}]}',
        '{"added_tokens": 5}',
    ],
)
def test_a_tokenizer_of_anybody(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ConvertError, match=r"tokenizer\.json"):
        tokens(Folder(folder))


def test_a_folder_without_tokenizer_json(folder: Path) -> None:
    """That of sentencepiece alone, or none: the mask is in config.json alone, which is told."""
    (folder / "tokenizer.model").write_bytes(b"sentencepiece")
    found = Folder(folder)
    assert true_ids(found, HuggingFace({"model_type": "llama", "vocab_size": 10})) == 10
    settings, note = _with_mask(found, 6)
    assert settings is None
    assert "id 6, stands in" in str(note)
    assert _with_mask(found, None) == (None, None)
    assert list(text_files(found, found)) == ["tokenizer.model"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[" * 200_000, "cannot be read as JSON"),
        (b'{"weight_map": {"a": %s}}' % (b"9" * 5000), "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b'{"weight_map": NaN}', "has no weight_map"),
        (b'{"weight_map": {"a": ["a.safetensors"]}}', "only plain names"),
        (b'{"weight_map": {"a": "..\\\\a.safetensors"}}', "only plain names"),
        (b'{"weight_map": {"a": "a\\u0000.safetensors"}}', "only plain names"),
    ],
)
def test_an_index_of_nonsense(folder: Path, content: bytes, words: str) -> None:
    (folder / INDEX).write_bytes(content)
    with pytest.raises(ConvertError, match=words):
        WeightFolder(folder)


def header(size: int, **tensor: Any) -> bytes:
    text = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | tensor})
    return struct.pack("<Q", size or len(text)) + text.encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        header(10**9) + bytes(8),
        header(2**63 + 5) + bytes(8),
        header(0),
        header(0) + bytes(16),
        header(0, shape=[400_000]) + bytes(8),
        header(0, shape=[-2]) + bytes(8),
        header(0, shape=[2**62, 8]) + bytes(8),
        header(0, data_offsets=[8, 16]) + bytes(16),
        header(0, dtype="PICKLE") + bytes(8),
    ],
)
def test_a_header_that_lies(folder: Path, content: bytes) -> None:
    (folder / "a.safetensors").write_bytes(content)
    with pytest.raises(ConvertError, match="no whole safetensors file"):
        WeightFolder(folder)
    (folder / "a.safetensors").write_bytes(header(0) + bytes(8))
    assert WeightFolder(folder).tensor("a").tolist() == [0, 0]


@pytest.mark.parametrize(
    ("ids", "there", "rows"),
    [
        (90, 128, 100),  # the padding of the run's table goes, that of the folder stays
        (101, 128, 101),  # an id was added
        (90, 96, 96),  # trained with fewer rows than the folder had
        (0, 100, 100),
    ],
)
def test_rows_of_the_tables(ids: int, there: int, rows: int) -> None:
    model = HuggingFace({"model_type": "llama", "vocab_size": 100})
    was = Namespace(bdlm_vocabulary=ids) if ids else Namespace()
    assert table_rows(was, model, there) == rows


def test_a_refusal_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.cpu, "needed", lambda: False)  # this process stays as it is
    monkeypatch.setattr(command.logging, "disable", lambda level: None)
    monkeypatch.setattr(command.warnings, "simplefilter", lambda action: None)
    for line, words in {
        "import gone out": "is no folder",
        "export out gone": "--like",
        "export out gone --like gone": "--like",
    }.items():
        with pytest.raises(SystemExit) as end:
            command.main([str(folder / w) if w in ("gone", "out") else w for w in line.split()])
        assert end.value.code == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert error.startswith("convert: error: ")
        assert words in error


@pytest.mark.parametrize("value", ["0", "-1", "inf", "nan", "x"])
def test_a_tolerance_without_meaning(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(["check", "folder", "checkpoint", f"--tolerance={value}"])
    assert end.value.code == 2
    assert "--tolerance" in capsys.readouterr().err
