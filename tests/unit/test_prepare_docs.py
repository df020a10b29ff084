"""The commands of docs/data.md, and of own chats in docs/sft.md, as they stand and in order."""

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatron_bp.data.checks import check_indexed, document_bytes
from megatron_bp.tools import prepare as tool

ROOT = Path(__file__).parents[2]
PYTHON = ".venv/bin/python"
PREPARE = f"{PYTHON} -m megatron_bp.tools.prepare"


def commands(page: str) -> list[str]:
    """Commands in the blocks of bash, each with its here document."""
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        found += re.findall(r"^.*<<'END'\n(?:.*\n)*?END$|^.+$", block, re.MULTILINE)
    return found


def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("megatron_bp", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    found = commands((ROOT / "docs/data.md").read_text())
    assert sum(command.startswith(PREPARE) for command in found) == 5
    for command in found:
        if command.startswith(PREPARE):  # in this process: Megatron takes seconds to import
            command = re.sub(r"--workers \d", "--workers 1", command)  # each imports Megatron too
            tool.main(shlex.split(command.removeprefix(PREPARE)))
            continue
        command = command.replace(PYTHON, sys.executable)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        ended = subprocess.run(
            ["bash", "-ec", command], env=environment, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stderr
    assert "checksum verified" in ended.stdout
    sets = [("jsonl", 2, 258), ("prose", 2, 258), ("bpe", 2, 400), ("chats", 2, 258)]
    for name, documents, vocabulary in sets:
        facts = check_indexed(f"data/guide/{name}", vocabulary)
        assert (facts.documents, facts.checksum) == (documents, "verified")
        assert document_bytes(f"data/guide/{name}") is not None
        assert json.loads(Path(f"data/guide/{name}.json").read_text())["documents"] == documents


def test_every_flag_and_reason_is_told() -> None:
    from megatron_bp.tools.prepare.outcome import FLAWS, REASONS

    page = (ROOT / "docs/data.md").read_text()
    help_text = subprocess.run(
        [sys.executable, "-m", "megatron_bp.tools.prepare", "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    flags = set(re.findall(r"--[a-z-]+", help_text)) - {"--help", "--tokenizer"}
    assert [flag for flag in sorted(flags) if f"{flag}" not in page] == []
    for reason in REASONS[1:]:
        (row,) = re.findall(rf"^\|.*`{reason}`.*\| (yes|no) \|$", page, re.MULTILINE)
        assert row == ("yes" if reason in FLAWS else "no")


def test_own_chats_from_their_page(tmp_path: Path) -> None:
    """Preparing and one step of training in one process, with the page's config."""
    for name in ("megatron_bp", "configs/templates", "configs/quickstart.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "configs/sft_quickstart.yaml").symlink_to(ROOT / "configs/sft_quickstart.yaml")
    page = textwrap.dedent((ROOT / "docs/sft.md").read_text())
    (bash,) = re.findall(r"^   ```bash\n(.*?)^   ```$", page, re.MULTILINE | re.DOTALL)
    (config,) = re.findall(r"^   ```yaml\n(.*?)^   ```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "configs/my_chats.yaml").write_text(textwrap.dedent(config))
    (train,) = re.findall(r"pretrain_bdlm.py (configs/my_chats.yaml .*)", page)
    small = "--block-parallel-size 1 --train-iters 1 --lr-warmup-iters 0 --seq-length 64"
    script = textwrap.dedent(bash).replace(PYTHON, sys.executable)
    script += f"{sys.executable} {ROOT}/pretrain_bdlm.py {train} {small}\n"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        ["bash", "-ec", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "training chats of data/guide/chats: 2 chats in 1 rows an epoch" in ended.stdout
    assert (tmp_path / "runs/my_chats/metrics.jsonl").is_file()
