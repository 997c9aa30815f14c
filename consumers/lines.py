"""Lines: a journal in the run's folder that one trainer has for itself, and that a full disk does not end."""

from __future__ import annotations

import logging
import shutil
import time
from collections import deque
from pathlib import Path
from typing import Any

from consumers import placing
from headrace.errors import ServiceError
from headrace.telemetry.journal import Journal

log = logging.getLogger(__name__)

MOST_WAITING = 1000
"""Lines that wait for room on the disk; of more, the oldest are left out, and the next one says how many were."""


class Lines:
    """Lines as JSON, in order. What finds no room on the disk waits for it in memory."""

    def __init__(self, file: Path, incarnation: int) -> None:
        """Raises ServiceError when the folder cannot be written."""
        _take_over(file, incarnation)
        self.journal = self._journal = Journal(file)
        """For lines that somebody else keeps while there is no room for them."""
        self.last = self._journal.last
        """The last line that was there, as an object; empty when there was none."""
        self._waiting: deque[tuple[str, dict[str, Any]]] = deque()
        self._left_out = 0
        self.trouble = ""
        """Why lines wait; empty while none does."""

    def write(self, event: str, **fields: Any) -> None:
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft()
            self._left_out += 1
        self._waiting.append((event, {"time": round(time.time(), 3), **fields}))
        self.flush()

    def flush(self) -> None:
        """Write what waits, as far as there is room."""
        try:
            while self._waiting:
                event, fields = self._waiting[0]
                # Not a line of its own: the last line is always one that somebody wrote.
                gap = {"lines_left_out": self._left_out} if self._left_out else {}
                self._journal.write(event, **fields, **gap)
                self._waiting.popleft()
                self._left_out = 0
            self.trouble = ""
        except ServiceError as error:
            self.trouble = f"{error}; its lines wait in memory"

    def close(self) -> None:
        self.flush()
        self._journal.close()


def _take_over(file: Path, incarnation: int) -> None:
    """Put a copy in the file's place: an earlier trainer that has it open writes where nobody reads from now on."""
    if not file.exists():
        return
    work = placing.beside(file, incarnation)
    try:
        shutil.copyfile(file, work)
        placing.place(work, file)
    except OSError as error:
        placing.remove(work)
        log.warning("%s stays the file that an earlier trainer may have open: %s", file, error.strerror)
