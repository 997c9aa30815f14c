"""How far a run is: the trainer's step lines as they are appended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 20
"""Read at most so much of a file at once."""


class Follower:
    """Reads the complete lines that are appended to a file of JSON lines."""

    def __init__(self, file: Path, *, from_end: bool = False) -> None:
        self._file = file
        self._offset = file.stat().st_size if from_end and file.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        """New lines since the last call; none while there is no file. Lines that are no JSON objects are left out."""
        try:
            with self._file.open("rb") as stream:
                stream.seek(self._offset)
                block = stream.read(_MOST_BYTES)
        except FileNotFoundError:
            return []
        whole = block[: block.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [fields for line in whole.splitlines() if (fields := _fields(line)) is not None]


def newest_step(file: Path) -> int | None:
    """The step of the file's last line; None for a run that made none."""
    follower = Follower(file)
    step = None
    while lines := follower.read():
        step = lines[-1].get("step", step)
    return step


def step_line(fields: dict[str, Any], steps: int) -> str:
    """One trainer step as one line, with dashes for what it does not say."""
    idle = fields.get("idle_wait") or {}
    generated, trained = fields.get("generated_tokens_per_s"), fields.get("trained_tokens_per_s")
    parts = [
        f"step {fields.get('step', 0):>{len(str(steps))}}/{steps}",
        f"reward {_number(fields.get('reward'), '5.2f')}",
        f"accuracy {_number(fields.get('accuracy'), '4.0%')}",
        f"lag {_number(fields.get('lag'), '3.1f')}",
        f"tokens/s: generated {_number(generated, '4.0f')} trained {_number(trained, '4.0f')}",
        f"idle: producers {_number(idle.get('producers'), '4.0%')} trainer {_number(idle.get('trainer'), '4.0%')}",
    ]
    if fields.get("skipped"):
        parts.append(f"skipped: {fields['skipped']}")
    return "  ".join(parts)


def _number(value: Any, spec: str) -> str:
    """A number, or a dash of the same width for one that is not known."""
    width = int(spec.split(".")[0])
    return format(value, spec) if isinstance(value, int | float) else "-".rjust(width)


def _fields(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
