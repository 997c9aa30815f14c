"""What happens to a local run, as its launcher tells it: on the screen, and in its journal."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from deploy.processes import Child
from deploy.screen import Screen
from headrace.errors import ServiceError
from headrace.telemetry.clock import now
from headrace.telemetry.journal import Journal

log = logging.getLogger(__name__)

NAME = "launcher"


class Events:
    """A full disk takes the journal from a run, but not the run."""

    def __init__(self, screen: Screen, file: Path) -> None:
        """Raises ServiceError when the journal's folder cannot be written."""
        self._screen = screen
        self._journal = Journal(file)
        self._unwritten = False
        """Whether the last event stands only on the screen."""

    def report(self, part: str, event: str, text: str) -> None:
        """For everybody to see."""
        self._screen.event(part, event, text)
        self._write(event, f"{part} {event} ({text})", part=part, text=text)

    def exited(self, name: str, child: Child) -> None:
        """A process has just ended: what it had not recorded is lost (docs/audit.md)."""
        self._write("exited", f"the end of {name}", **exit_fields(name, child))

    def close(self) -> None:
        self._journal.close()

    def _write(self, event: str, what: str, **fields: Any) -> None:
        try:
            self._journal.write(event, **fields)
        except ServiceError as error:
            log.warning("%s stands in no journal: %s", what, error)
            if not self._unwritten:
                self._screen.event(NAME, "in trouble", f"{error}; until it can be, events are only shown here")
            self._unwritten = True
        else:
            if self._unwritten:
                self._screen.event(NAME, "goes on", "its journal can be written again")
            self._unwritten = False


def exit_fields(name: str, child: Child) -> dict[str, Any]:
    """Of an event "exited": from when to when this process of a service lived."""
    return {
        "part": name,
        "text": f"its process {child.pid} ended",
        "service": name,
        "pid": child.pid,
        "code": child.code,
        "began": child.began,
        "at": now(),
    }
