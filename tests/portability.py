"""Records of portability for tests, of round numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from audit.portability_rates import PARTS
from audit.portability_record import FORMAT, VERSION, Rate, Record
from headrace.config import Config
from producers.engines.api import Engine
from producers.engines.scripted import ScriptedEngine
from producers.engines.traits import Trait, Traits


def rate(length: int, batch: int, parts: tuple[float, ...], *, seconds: float = 120.0, **changes: Any) -> Rate:
    """Of two `parts`, the first and the last, with those between in a line; or of all of them. Completions took a tenth
    of the time, unless told otherwise.
    """
    if len(parts) == 2:
        parts = tuple(parts[0] + (parts[1] - parts[0]) * place / (PARTS - 1) for place in range(PARTS))
    fields: dict[str, Any] = {
        "completion_tokens": length,
        "batch": batch,
        "seconds": seconds,
        "tokens_per_s": sum(parts) / len(parts),
        "parts_tokens_per_s": list(parts),
        "in_flight": float(batch),
        "completions": 10,
        "completion_s": seconds / 10,
        "mean_tokens": float(length),
    }
    return Rate(**{**fields, **changes})


def record(label: str, single: list[Rate], sustained: list[Rate], **changes: Any) -> Record:
    """Of an engine that has a paged cache, no attention kernel, and does not tell of its backend."""
    traits = Traits(
        device="cpu",
        software="torch",
        attention_kernel=Trait(False, "composed"),
        paged_cache=Trait(True, "pages of 32 tokens"),
    )
    fields: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "made": "2026-01-01T00:00:00+00:00",
        "label": label,
        "host": "a",
        "engine": "torch",
        "model": "smollm2",
        "prompt_tokens": 64,
        "traits": traits,
        "single": single,
        "sustained": sustained,
    }
    return Record(**{**fields, **changes})


def small_engine(config: Config, folder: Path, seed: int) -> Engine:
    """A factory of an engine that is smaller than whatever is asked for."""
    return ScriptedEngine(slots=2, context_length=32)
