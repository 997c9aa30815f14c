"""Fixtures of the audit's tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.audit.planted import Planted


@pytest.fixture
async def planted(redis_url: str, run_id: str, tmp_path: Path, no_key_left: None) -> AsyncIterator[Planted]:
    """A run of which nothing is left afterwards."""
    memory = Path(tempfile.mkdtemp(prefix="headrace-test-", dir="/dev/shm"))
    made = Planted(redis_url, run_id, tmp_path, memory)
    yield made
    await made.close()
    shutil.rmtree(memory)
