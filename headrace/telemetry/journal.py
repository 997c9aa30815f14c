"""The journal: events of one service as JSON lines in the run's folder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from headrace.errors import ServiceError


class Journal:
    """Appends one JSON object per line; each has `time` (seconds since the epoch) and `event`."""

    def __init__(self, file: Path) -> None:
        """Raises ServiceError when the folder cannot be written."""
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._stream = file.open("ab", buffering=0)
        except OSError as error:
            raise ServiceError(f"journal {file} cannot be written: {error.strerror}") from error

    def write(self, event: str, **fields: Any) -> None:
        """Append one line. Raises ServiceError on a full disk."""
        try:
            self._stream.write(json.dumps({"time": round(time.time(), 3), "event": event, **fields}).encode() + b"\n")
        except OSError as error:
            raise ServiceError(f"journal {self._stream.name} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        self._stream.close()
