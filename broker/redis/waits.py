"""The calls of one service that wait for Redis: what is said of them, once for all, and who is told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

NOTICED_S = 1.0
"""A call that has waited so long is an outage; a connection that is opened anew is none."""
SAY_AGAIN_S = 10.0
"""An outage that lasts is said this often."""


class Waits:
    """Of one connection. `on_outage` is told why calls wait, each time that changes, and "" once none does."""

    def __init__(self, place: str) -> None:
        self.on_outage: Callable[[str], None] | None = None
        self._place = place
        self._noticed: set[object] = set()
        """Calls that have waited for long; each leaves it by `over`."""
        self._told = ""
        self._said: dict[str, float] = {}
        self._since = 0.0
        """When the outage began that is said of."""

    def note(self, call: object, sentence: str, lasted_s: float, most_s: float) -> None:
        """One try of a call has failed, because of what `sentence` says (nothing, where that is mended already)."""
        now = time.monotonic()
        if sentence and now - self._said.get(sentence, -SAY_AGAIN_S) >= SAY_AGAIN_S:
            if not self._said:
                self._since = now - lasted_s
            self._said = {text: at for text, at in self._said.items() if now - at < SAY_AGAIN_S} | {sentence: now}
            so_far = f", {lasted_s:.0f} s so far" if NOTICED_S <= lasted_s < most_s else ""
            log.warning("%s; waiting for it%s, %g s at most", sentence, so_far, most_s)
        if sentence and lasted_s >= NOTICED_S:
            self._noticed.add(call)
            self._tell(sentence)

    def over(self, call: object, *, answered: bool) -> None:
        """A call that had waited has its answer, or has given up."""
        self._noticed.discard(call)
        if answered and self._said:
            self._said.clear()
            log.warning("Redis at %s answers again after %.1f s", self._place, max(0.1, time.monotonic() - self._since))
        if not self._noticed:
            self._tell("")

    def _tell(self, sentence: str) -> None:
        if sentence != self._told:
            self._told = sentence
            if self.on_outage is not None:
                self.on_outage(sentence)
