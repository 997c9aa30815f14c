"""Fixtures of whole runs: what is started here must be gone when the module or the test is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launches import Launches


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs one after another, each process of which imports torch, on a machine that others share."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(900))


def launches(folder: Path) -> Iterator[Launches]:
    made = Launches(folder)
    yield made
    made.close()


@pytest.fixture(scope="module")
def module_launches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launches]:
    """Of all tests of a module."""
    yield from launches(tmp_path_factory.mktemp("launches"))


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launches]:
    """Of one test."""
    yield from launches(tmp_path)
