"""How far a run is: the trainer's step lines as they are appended, and what the services say in their heartbeats."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.api import Peer

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


@dataclass(frozen=True, slots=True)
class Fleet:
    """All producers together, as they say themselves."""

    alive: int = 0
    tokens_per_s: float = 0.0
    idle: float | None = None
    """Mean idle-wait fraction; None when none says."""

    @classmethod
    def of(cls, peers: Iterable[Peer]) -> Fleet:
        producers = [peer for peer in peers if peer.role == "producer" and peer.alive]
        idles = [float(peer.state["idle"]) for peer in producers if "idle" in peer.state]
        return cls(
            len(producers),
            sum(float(peer.state.get("tokens_per_s", 0.0)) for peer in producers),
            sum(idles) / len(idles) if idles else None,
        )


def step_line(fields: dict[str, Any], steps: int, fleet: Fleet) -> str:
    """One trainer step as one line; what the trainer does not say about producers comes from `fleet`."""
    idle = fields.get("idle_wait") or {}
    producers_idle = idle.get("producers", fleet.idle)
    generated = fields.get("generated_tokens_per_s", fleet.tokens_per_s)
    trained = fields.get("trained_tokens_per_s")
    parts = [
        f"step {fields.get('step', 0):>{len(str(steps))}}/{steps}",
        f"reward {_number(fields.get('reward'), '5.2f')}",
        f"accuracy {_number(fields.get('accuracy'), '4.0%')}",
        f"lag {_number(fields.get('lag'), '3.1f')}",
        f"tokens/s: generated {_number(generated, '4.0f')} trained {_number(trained, '4.0f')}",
        f"idle: producers {_number(producers_idle, '4.0%')} trainer {_number(idle.get('trainer'), '4.0%')}",
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
