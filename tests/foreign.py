"""The producer of another make, as a module: it lies in examples/, which is no package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

PLAYER = Path(__file__).parents[1] / "examples" / "foreign_producer.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("foreign_producer", PLAYER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


foreign = _load()
