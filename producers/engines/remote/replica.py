"""One server and what is known of it: whether it works, which version it is on, what is open there.

Wait graph of `keep`, one loop per server: it waits for the server to answer (bounded by `start_s` or `outage_s`), for
the first version (woken by `offer`), for time (`poll_s`) or a doubt (woken by a request that failed), and for an update
(bounded by its own deadline). Requests wait for their answers or for `life`, which ends when the server is found not
to work: then they go elsewhere. Nobody else waits for `keep`.

    starting ──> empty ──> serving <──> updating      back also where an update failed before it touched anything
       ^           ^          │  │          │
       └───────────┴── broken <──┴──────────┘        lost: beyond repair, or taken by somebody else

What a kind of server is asked stands with the kind: in its subclass.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from headrace.errors import EngineError, HeadraceError
from headrace.version import PolicyVersion
from producers.engines.remote.answers import Generated
from producers.engines.remote.http import ServerBroken, ServerGone
from producers.engines.remote.job import Job
from producers.engines.remote.options import ServerOptions
from producers.engines.remote.spans import Labels
from producers.engines.remote.staged import Staged
from producers.engines.remote.updating import UpdateFailed

log = logging.getLogger(__name__)

State = Literal["starting", "empty", "serving", "updating", "broken", "lost"]
PROVEN_S = 600.0
"""A server that has worked for so long begins anew with its failures."""
LOOKS_PER_CHECK = 8
"""Every so many looks it is looked at closely."""
MOST_DOUBTS = 3
"""Failed requests in a row, from which on it counts as broken although it answers."""
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.2, 60.0


def backoff_s(failures: int) -> float:
    """Seconds until the next try, at random, so that not all try at the same moment."""
    most = min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures, 16))
    return random.uniform(most / 2, most)


class Taken(EngineError):
    """The server is somebody else's; nobody fights for it."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What every server is to have: a version, and where it lies; None where it is what a server starts with."""

    version: PolicyVersion
    staged: Staged | None


class Replica(abc.ABC):
    """For one event loop. `changed` is called whenever it may take more, or less, than before."""

    def __init__(
        self, name: str, options: ServerOptions, labels: Labels, slots: int, changed: Callable[[], None]
    ) -> None:
        """`slots`: requests open there at most."""
        self.name = name
        self.state: State = "starting"
        self.why = ""
        """Of the states "broken" and "lost"."""
        self.version: PolicyVersion | None = None
        """What it samples from; None where that is not known."""
        self.open = 0
        """Requests that are open there."""
        self.limit = slots
        self.life: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Ended, with the reason, when what is open there must go elsewhere."""
        self.begun = asyncio.Event()
        """Set once it has answered for the first time, or is lost."""
        self._patience, self._labels = options, labels
        self._slots, self._changed = slots, changed
        self._offer: Offer | None = None
        self._offered = asyncio.Event()
        self._weights = asyncio.Lock()
        self._doubt = asyncio.Event()
        self._doubts = self._failures = self._refusals = self._loads = 0

    @property
    def takes(self) -> bool:
        """Whether it is given requests."""
        return self.state == "serving" and not self._doubt.is_set()

    @abc.abstractmethod
    async def ask(self, job: Job, rid: str, label: str) -> Generated:
        """What it samples for a job behind the tokens so far. Raises ServerGone, ServerBroken, ServerRefused."""

    @abc.abstractmethod
    async def abort(self, rid: str) -> None:
        """End that request: `ask` returns what there is of it. Raises EngineError."""

    async def offer(self, offer: Offer) -> float:
        """Bring a version into it; the seconds for which it stood still, 0 where it is not serving.

        Never fails: a server that was not touched goes on with the version that it has, and is offered one again; any
        other takes no requests until it has it. When this returns nothing reads the version before any more.
        """
        self._offer = offer
        self._offered.set()
        if self._refusals and self.state == "serving":
            await asyncio.sleep(backoff_s(self._refusals))
        async with self._weights:
            if self.state != "serving" or self.version == offer.version:
                return 0.0
            self._enter("updating")
            self._loads += 1
            try:
                seconds = await self._bring(offer, reload=False)
            except UpdateFailed as error:
                self._refused(error)
                return 0.0
            except HeadraceError as error:
                self._break(str(error))
                return 0.0
            except BaseException:
                self._break("its update was cancelled")
                raise
            self._refusals = 0
            if not self._is("broken"):
                self._enter("serving")
            return seconds

    def failed(self, error: EngineError) -> None:
        """A request to it failed: it is looked at at once, and given nothing before that."""
        self._doubts += 1
        log.warning("server %s: %s", self.name, error)
        if self._doubts >= MOST_DOUBTS:
            self._break(f"{self._doubts} requests in a row failed, the last one so: {error}")
        self._doubt.set()
        self._changed()

    def answered(self, retractions: int) -> None:
        """A request to it was answered; `retractions`: how often it was taken out again for want of cache."""
        self._doubts = 0

    async def keep(self) -> None:
        """Keep it working until cancelled, or it is lost."""
        try:
            while self.state != "lost":
                await self._life()
        except Exception as error:
            # Nobody awaits this loop: whoever waits for the server has to hear of a bug here.
            self._lose(f"this engine failed: {error!r}")
            raise

    async def close(self) -> None:
        """End what was started. Idempotent; `keep` was cancelled before."""
        self._enter("lost")
        self._end_life("the engine was closed")
        await self._end()

    @abc.abstractmethod
    async def _begin(self) -> None:
        """Have a server that answers. Raises HeadraceError, Taken."""

    @abc.abstractmethod
    async def _bring(self, offer: Offer, *, reload: bool) -> float:
        """Bring a version into it; the seconds for which it stood still. `reload`: whatever it has. Raises
        HeadraceError."""

    @abc.abstractmethod
    async def _look(self) -> None:
        """Its own figures, and what follows from them. Raises HeadraceError where it does not work."""

    @abc.abstractmethod
    async def _check(self) -> None:
        """Whether it computes, and is the server, with the weights, that it was. Raises HeadraceError, Taken."""

    @abc.abstractmethod
    async def _mend(self) -> bool:
        """After a failure: whether there is, or will be by `_begin`, a server."""

    @abc.abstractmethod
    async def _end(self) -> None:
        """Let go of it. Idempotent."""

    async def _life(self) -> None:
        """From its beginning to a failure, and what follows from that."""
        try:
            await self._begin()
            self._enter("empty")
            self.begun.set()
            await self._fill()
            await self._watch()
        except Taken as error:
            self._lose(str(error))
        except HeadraceError as error:
            self._break(str(error))
            await self._recover()

    async def _fill(self) -> None:
        """Bring the newest version into it, whatever it has. Raises HeadraceError."""
        await self._offered.wait()
        async with self._weights:
            assert self._offer is not None
            await self._bring(self._offer, reload=True)
            self._doubts = self._refusals = 0
            self._doubt.clear()
            self._enter("serving")

    async def _watch(self) -> None:
        """Look at it until it does not work. Raises HeadraceError, Taken."""
        since, looks = time.monotonic(), 0
        while True:
            with contextlib.suppress(TimeoutError):
                # Not asyncio.wait_for, which loses a cancellation that comes together with the event (Python 3.11).
                async with asyncio.timeout(self._patience.poll_s):
                    await self._doubt.wait()
            async with self._weights:
                pass  # An update has a deadline of its own, and the server may answer nothing else meanwhile.
            if self._is("broken"):
                raise ServerBroken(self.why)
            looks += 1
            doubted, loads = self._doubt.is_set(), self._loads
            try:
                await self._look()
                if doubted or looks % LOOKS_PER_CHECK == 0:
                    await self._check()
            except ServerGone:
                if self._loads == loads:
                    raise
                continue
            if doubted and not self._is("broken"):
                self._doubt.clear()
                self._changed()
            if time.monotonic() - since > PROVEN_S:
                self._failures = 0

    async def _recover(self) -> None:
        """Wait before the next try, or give up: at once where it has never worked."""
        self._failures += 1
        if not self.begun.is_set():
            self._lose(self.why)
        elif self._failures > self._patience.restarts:
            self._lose(f"it failed {self._failures} times in a row, the last time so: {self.why}")
        elif not await self._mend():
            self._lose(f"it was away for {self._patience.outage_s:.0f} s: {self.why}")
        else:
            await asyncio.sleep(backoff_s(self._failures))

    def _refused(self, error: UpdateFailed) -> None:
        """It does not have the version that it was offered."""
        self._refusals += 1
        if error.half_way or self._refusals > self._patience.restarts or self._is("broken"):
            self._break(str(error))
            return
        log.warning("server %s goes on with version %s: %s", self.name, self.version, error)
        # It may have failed because the server does not work.
        self._doubt.set()
        self._enter("serving")

    def _break(self, why: str) -> None:
        if self.state in ("broken", "lost"):
            return
        self.why = why
        log.warning("server %s takes no requests until it is reloaded: %s", self.name, why)
        self._enter("broken")
        self._doubt.set()
        self._end_life(why)

    def _lose(self, why: str) -> None:
        self.why = why
        log.error("server %s is given up: %s", self.name, why)
        self._enter("lost")
        self._end_life(why)
        self.begun.set()

    def _end_life(self, why: str) -> None:
        """What is open there goes elsewhere."""
        self.version = None
        if not self.life.done():
            self.life.set_result(why)
        self.life = asyncio.get_running_loop().create_future()

    def _is(self, state: State) -> bool:
        """Now, whatever it was before the last wait."""
        return self.state == state

    def _enter(self, state: State) -> None:
        if self.state != "lost":
            self.state = state
        self._changed()
