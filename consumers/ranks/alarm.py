"""The alarm: every rank learns within a moment that another has failed, and why, whatever it computes or waits for.

Wait graph: a thread of each rank exchanges a few bytes with those of all others, twice a second, over a channel of its
own. It waits for them `silent_s` at most; a process that ends closes its connections, which ends the wait at once.
Whoever heard of a failure has `GRACE_S` to leave in order: a thread that is stuck in a collective of a rank that is no
more cannot be ended, but its process can.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable

from consumers.ranks.channel import Channel
from headrace.errors import ServiceError

log = logging.getLogger(__name__)

PERIOD_S = 0.5
HEARD_S = 10.0
"""Until others have heard what a rank says last."""
GRACE_S = 20.0
LONGEST = 1000
"""Bytes of a reason that are passed on."""
_WELL, _FAILED, _ENDED = b"w", b"f", b"e"


class Alarm:
    def __init__(self, channel: Channel, name: str, silent_s: float, dead: Callable[[], str]) -> None:
        """`name`: of this process, for its last words; `dead`: which rank is known to have died, empty where none."""
        self.failure = ""
        """Why the trainer cannot go on; empty while it can."""
        self._channel = channel
        self._name = name
        self._silent_s = silent_s
        self._dead = dead
        self._mine = _WELL
        self._changed = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-alarm", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def fail(self, reason: str) -> None:
        """This rank cannot go on. Returns once the others know, or know already of another one."""
        self._say(_FAILED + reason.encode()[:LONGEST])

    def end(self) -> None:
        """This rank has done its work. Returns once all others have, too."""
        self._say(_ENDED)

    def explained(self, seconds: float) -> str:
        """The failure, where one becomes known within so many seconds."""
        self._over.wait(seconds)
        return self.failure

    def _say(self, what: bytes) -> None:
        if not self._over.is_set():
            self._mine = what
            self._changed.set()
            self._over.wait(HEARD_S)

    def _run(self) -> None:
        while True:
            try:
                said = self._channel.gather(self._mine)
            except RuntimeError as error:
                self.failure = self._silence(error)
                break
            if failed := [f"rank {rank}: {_text(one)}" for rank, one in enumerate(said) if one[:1] == _FAILED]:
                self.failure = failed[0]
                break
            if all(one == _ENDED for one in said):
                self._over.set()
                return
            self._changed.wait(PERIOD_S)
            self._changed.clear()
        self._over.set()
        threading.Event().wait(GRACE_S)
        print(f"{self._name}: {self.failure}", file=sys.stderr, flush=True)
        os._exit(ServiceError.exit_code)

    def _silence(self, error: RuntimeError) -> str:
        log.info("%s", error)
        who = self._dead()
        if not who:
            slow = "timed out" in str(error).lower()
            who = f"another rank was silent for {self._silent_s:g} s" if slow else "another rank has died"
        return f"{who}, and the trainer ends with it; --resume goes on from the newest checkpoint"


def _text(said: bytes) -> str:
    return said[1:].decode(errors="replace")
