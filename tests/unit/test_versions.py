"""What is installed is checked before anything starts."""

import importlib.metadata

import pytest
import torch

from megatron_bp.arguments import versions


def test_what_is_installed_suits() -> None:
    versions.check_versions()


def test_another_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.20.0")
    with pytest.raises(versions.VersionError, match=r"0\.20\.0 is installed, 0\.19\.2 is needed"):
        versions.check_versions()


@pytest.mark.parametrize(("version", "ok"), [("2.8.1+cu126", False), ("2.9.0", True)])
def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch, version: str, ok: bool) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    if ok:
        versions.check_versions()
    else:
        with pytest.raises(versions.VersionError, match=r"at least 2\.9 is needed"):
            versions.check_versions()


def test_a_missing_feature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(versions.NEEDED, "future", (torch, "no_such_thing", "test this"))
    with pytest.raises(versions.VersionError, match=r"torch\.no_such_thing, needed to test this"):
        versions.check_versions()
