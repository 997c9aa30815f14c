"""Fixtures of whole runs: what is started here must be gone when the module or the test is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launches import Launches
from tests.support import wait_here


def launches(folder: Path) -> Iterator[Launches]:
    made = Launches(folder)
    yield made
    made.close()
    wait_here(lambda: made.processes() == [], "all processes are gone")


@pytest.fixture(scope="module")
def module_launches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launches]:
    """Of all tests of a module."""
    yield from launches(tmp_path_factory.mktemp("launches"))


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launches]:
    """Of one test."""
    yield from launches(tmp_path)
