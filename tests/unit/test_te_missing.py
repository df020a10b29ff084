"""--clean-kv-exchange te where Transformer Engine does not import: refused at start-up."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from megatron_bp.attention.exchange import te


class Failing:
    """A finder whose transformer_engine fails to import, as a half installation does."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def find_spec(self, name: str, *unused: Any) -> ModuleSpec | None:
        if name.split(".")[0] == "transformer_engine":
            raise self.error
        return None


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    te.collectives.cache_clear()
    yield
    te.collectives.cache_clear()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ModuleNotFoundError("No module named 'transformer_engine'"),
            "ModuleNotFoundError: No mod",
        ),
        (RuntimeError("Found empty meta package.\nInstall"), "(RuntimeError: Found empty meta pac"),
        (OSError("libcudnn.so.9: no such file"), "(OSError: libcudnn.so.9: no such file)"),
        (AssertionError(), "(AssertionError: )"),
    ],
)
def test_why_it_does_not_import(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    monkeypatch.setattr(sys, "meta_path", [Failing(error), *sys.meta_path])
    with pytest.raises(ValueError, match=r"^--clean-kv-exchange te: ") as caught:
        te.collectives()
    assert words in str(caught.value)
    assert "or give --clean-kv-exchange all_gather" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_version_without_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformer_engine", "transformer_engine.pytorch", te.MODULE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(ValueError, match="gather_along_first_dim"):
        te.collectives()


def test_refused_at_start_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_bp.arguments.attention import refuse_attention
    from megatron_bp.arguments.refused import RefusedError

    arguments = Namespace(
        block_parallel_size=2,
        context_parallel_size=2,
        bdlm_cp_comm_type="all_gather",
        clean_kv_exchange="te",
        clean_kv_rows=None,
        needed_rows_fraction=0.75,
        recompute_keep_attention=False,
        keep_gathered_kv=False,
        query_scale_beta=None,
        query_scale_length=None,
    )
    monkeypatch.setattr(sys, "meta_path", [Failing(ImportError("not here")), *sys.meta_path])
    with pytest.raises(RefusedError, match="ImportError: not here"):
        refuse_attention(arguments, {"--clean-kv-exchange"})
    arguments.clean_kv_exchange = "all_gather"
    refuse_attention(arguments, {"--clean-kv-exchange"})
