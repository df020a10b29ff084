"""Paths, and an early start for the rank processes."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
for folder in (TESTS.parent, TESTS):  # pyproject.toml's pythonpath, for a pytest started elsewhere
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Lets the fork server import Megatron while the first tests run."""
    chosen = any(item.get_closest_marker("ranks") for item in session.items)
    if chosen and not session.config.option.collectonly:
        import ranks

        ranks.start()
