"""The journal: events of one service as JSON lines in the run's folder."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ServiceError

if TYPE_CHECKING:
    from headrace.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_LONGEST_LINE = 1 << 20
"""Bytes at the end of a file within which the beginning of its last line is looked for."""


class Journal:
    """Appends one JSON object per line; each has `time` (seconds since the epoch) and `event`. Any thread may write.

    A field that is not a finite number is null: JSON has no others.
    """

    def __init__(self, file: Path) -> None:
        """Raises ServiceError when the folder cannot be written."""
        try:
            self._lock = threading.Lock()
            file.parent.mkdir(parents=True, exist_ok=True)
            self._stream = file.open("a+b", buffering=0)
            self.last = self._mend()
            """The last line that was there at opening, as an object; empty when there was none."""
        except OSError as error:
            raise ServiceError(f"journal {file} cannot be written: {error.strerror}") from error

    def write(self, event: str, **fields: Any) -> None:
        """Append one line, whole or not at all. Raises ServiceError on a full disk."""
        known = {name: None if _not_finite(value) else value for name, value in fields.items()}
        left = json.dumps({"time": round(time.time(), 3), "event": event, **known}).encode() + b"\n"
        with self._lock:
            size = os.fstat(self._stream.fileno()).st_size
            try:
                # The last bytes of a disk take a part of a line without an error; the rest then says that it is full.
                while left:
                    left = left[self._stream.write(left) :]
            except OSError as error:
                with contextlib.suppress(OSError):
                    self._stream.truncate(size)
                raise ServiceError(f"journal {self._stream.name} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        self._stream.close()

    def _mend(self) -> dict[str, Any]:
        """Take away what a full disk or a crash left of a line, so that the next one begins at its beginning."""
        size = self._stream.seek(0, os.SEEK_END)
        if not size:
            return {}
        self._stream.seek(max(0, size - _LONGEST_LINE))
        # A file's single read is whole but for a signal, and then only shorter lines are found.
        tail = self._stream.read(_LONGEST_LINE)
        whole = tail[: tail.rfind(b"\n") + 1]
        if len(whole) < len(tail):
            self._stream.truncate(size - len(tail) + len(whole))
        try:
            last = json.loads(whole.splitlines()[-1]) if whole else {}
        except ValueError:
            last = {}
        return last if isinstance(last, dict) else {}


class LossyJournal:
    """A journal that its service can go on without: a line that finds no room on the disk is left out and counted."""

    def __init__(self, journal: Journal | None, metrics: Metrics, going_on: str) -> None:
        """Without `journal` nothing is written. `going_on` says in the log what a full disk does not end."""
        self._journal = journal
        self._metrics = metrics
        self._going_on = going_on
        self._trouble: dict[str, Any] | None = None

    def write(self, event: str, **fields: Any) -> None:
        """One line, where there is room for it."""
        if self._journal is None:
            return
        try:
            self._journal.write(event, **fields)
        except ServiceError as error:
            self._metrics.count("journal_lines_lost", help="Lines that could not be written")
            if self._trouble is None:
                reason = f"{error}; {self._going_on} without it"
                log.warning("%s", reason)
                self._trouble = {"kind": "lines", "reason": reason, "since": round(time.time(), 1)}
        else:
            self._trouble = None

    def troubles(self) -> list[dict[str, Any]]:
        """Kind, reason, and since when (seconds since the epoch) lines are lost; none while they are not."""
        return [self._trouble] if self._trouble is not None else []

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
