"""How far a run is: the trainer's step lines as they are appended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.errors import ServiceError

_MOST_BYTES = 1 << 20
"""Read at most so much of a file at once."""


class Follower:
    """Reads the complete lines that are appended to a file of JSON lines."""

    def __init__(self, file: Path, *, from_end: bool = False) -> None:
        self._file = file
        self._offset = file.stat().st_size if from_end and file.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        """New lines since the last call; none while there is no file.

        Lines that are no JSON objects, or whose step is no whole number, are left out. Raises ServiceError for a file
        that cannot be read.
        """
        while block := self._block():
            if lines := [fields for line in block.splitlines() if (fields := _fields(line)) is not None]:
                return lines
        return []

    def _block(self) -> bytes:
        """The next whole lines; nothing where there are none."""
        try:
            with self._file.open("rb") as stream:
                stream.seek(self._offset)
                block = stream.read(_MOST_BYTES)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise ServiceError(f"{self._file} cannot be read: {error.strerror}") from error
        # No step's line is as long as a block: what has no end there is none.
        whole = block if len(block) == _MOST_BYTES and b"\n" not in block else block[: block.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole


def newest_step(file: Path) -> int | None:
    """The step of the file's last line; None for a run that made none. Raises ServiceError as `Follower.read` does."""
    follower = Follower(file)
    step = None
    while lines := follower.read():
        step = lines[-1].get("step", step)
    return step


def step_line(fields: dict[str, Any], steps: int) -> str:
    """One trainer step as one line, with dashes for what it does not say."""
    waits = fields.get("idle_wait")
    idle = waits if isinstance(waits, dict) else {}
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
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and type(value.get("step", 0)) is int else None
