"""One server and what is known of it: whether it works, which version it is on, what is open there.

Wait graph of `keep`, one loop per server: it waits for the server to answer (bounded by `start_s` or `outage_s`), for
the first version (woken by `offer`), for the updater (bounded by its own deadline), then for time (`poll_s`) or a doubt
(woken by a request that failed). Requests wait for their answers or for `life`, which ends when the server is found not
to work: then they go elsewhere. Nobody else waits for `keep`.

    starting ──> empty ──> serving <──> updating
       ^           ^          │  │          │
       └───────────┴── broken <──┴──────────┘        lost: beyond repair, or taken by somebody else
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from headrace.errors import EngineError, HeadraceError
from headrace.version import PolicyVersion
from producers.engines.sglang.answers import Generated
from producers.engines.sglang.client import ServerBroken, ServerGone, ServerRefused, SglangClient
from producers.engines.sglang.job import Job
from producers.engines.sglang.options import Options
from producers.engines.sglang.place import Place, backoff_s
from producers.engines.sglang.refill import Load, ceiling, next_limit
from producers.engines.sglang.spans import Labels
from producers.engines.sglang.staged import Staged
from producers.engines.sglang.updates import Updater, capabilities

log = logging.getLogger(__name__)

State = Literal["starting", "empty", "serving", "updating", "broken", "lost"]
PROVEN_S = 600.0
"""A server that has worked for so long begins anew with its failures."""
LOOKS_PER_CHECK = 8
"""Every so many looks at its figures, the scheduler itself is asked, and whose weights these are."""
LOOKS_IF_USED, LOOK_IF_USED_S = 20, 0.25
"""Requests that somebody has just given up are there for a moment still."""
MOST_DOUBTS = 3
"""Failed requests in a row, from which on it counts as broken although it answers."""


class Taken(EngineError):
    """The server is somebody else's; nobody fights for it."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What every server is to have: a version, and where it lies; None where it is what a server starts with."""

    version: PolicyVersion
    staged: Staged | None


class Replica:
    """For one event loop. `changed` is called whenever it may take more, or less, than before."""

    def __init__(
        self, name: str, place: Place, options: Options, labels: Labels, slots: int, changed: Callable[[], None]
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
        self.load: Load | None = None
        self.limit = self.most = slots
        self.running = slots
        """Requests that it computes at once."""
        self.info: dict[str, Any] = {}
        self.life: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Ended, with the reason, when what is open there must go elsewhere."""
        self.begun = asyncio.Event()
        """Set once it has answered for the first time, or is lost."""
        self._place, self._options, self._labels = place, options, labels
        self._slots, self._changed = slots, changed
        self._updater: Updater | None = None
        self._offer: Offer | None = None
        self._offered = asyncio.Event()
        self._weights = asyncio.Lock()
        self._doubt = asyncio.Event()
        self._doubts = self._failures = self._retractions = 0
        self._start_id = ""

    @property
    def client(self) -> SglangClient:
        return self._place.client

    @property
    def takes(self) -> bool:
        """Whether it is given requests."""
        return self.state == "serving" and not self._doubt.is_set()

    @property
    def seeded(self) -> bool:
        """Whether it can fix a request's random numbers."""
        return bool(self.info.get("enable_deterministic_inference"))

    async def ask(self, job: Job, rid: str, label: str) -> Generated:
        return await self.client.generate(job.body(rid, label, seeded=self.seeded))

    async def abort(self, rid: str) -> None:
        await self.client.abort_request(rid)

    async def offer(self, offer: Offer) -> float:
        """Bring a version into it; the seconds for which it stood still, 0 where it is not serving.

        Never fails: a server that does not get it takes no requests until it has it. When this returns nothing reads
        the version before any more.
        """
        self._offer = offer
        self._offered.set()
        async with self._weights:
            if self.state != "serving" or self.version == offer.version:
                return 0.0
            self._enter("updating")
            try:
                seconds = await self._bring(offer, reload=False)
            except HeadraceError as error:
                self._break(str(error))
                return 0.0
            except BaseException:
                self._break("its update was cancelled")
                raise
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
        self._retractions += retractions

    async def keep(self) -> None:
        """Keep it working until cancelled, or it is lost."""
        while self.state != "lost":
            try:
                await self._begin()
                await self._fill()
                await self._watch()
            except Taken as error:
                self._lose(str(error))
            except HeadraceError as error:
                self._break(str(error))
                await self._recover()

    async def close(self) -> None:
        """End what was started. Idempotent; `keep` was cancelled before."""
        self._enter("lost")
        self._end_life("the engine was closed")
        if self._updater is not None:
            await self._updater.close()
        await self._place.close()

    async def _begin(self) -> None:
        """Have a server that answers. Raises HeadraceError, Taken."""
        self.info = await self._place.open()
        self._start_id = _start_id(self.info)
        if not self.begun.is_set():
            await self._refuse_if_used(await self._label())
        if self._updater is not None:
            await self._updater.close()
        options = self._options
        found = await capabilities(self.client)
        self._updater = Updater(self.client, found, options.kv, options.means, options.verify)
        running = int(self.info.get("max_running_requests") or 0) * int(self.info.get("dp_size") or 1)
        self.running = running or self._slots
        self.limit = self.most = ceiling(self._slots, running)
        self._enter("empty")
        self.begun.set()

    async def _fill(self) -> None:
        """Bring the newest version into it, whatever it has. Raises HeadraceError."""
        await self._offered.wait()
        async with self._weights:
            assert self._offer is not None
            await self._bring(self._offer, reload=True)
            self.load = None
            self._doubts = 0
            self._doubt.clear()
            self._enter("serving")

    async def _bring(self, offer: Offer, *, reload: bool) -> float:
        """Raises HeadraceError. The label is looked at, too: what answers must be what was told."""
        assert self._updater is not None
        label, seconds = self._labels.of(offer.version), 0.0
        if offer.staged is None:
            await self.client.update_weight_version(label)
        elif reload:
            seconds = await self._updater.reload(offer.staged, label)
        else:
            seconds = await self._updater.update(offer.staged, label)
        if (found := await self._label()) != label:
            raise ServerBroken(f"it says that it is on {found!r} after an update to {label!r}")
        self.version = offer.version
        return seconds

    async def _watch(self) -> None:
        """Look at it until it does not work. Raises HeadraceError, Taken."""
        since, looks = time.monotonic(), 0
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._doubt.wait(), self._options.poll_s)
            if self._is("broken"):
                raise ServerBroken(self.why)
            looks += 1
            doubted = self._doubt.is_set()
            await self._look()
            if doubted or looks % LOOKS_PER_CHECK == 0:
                await self._check()
            if doubted and not self._is("broken"):
                self._doubt.clear()
                self._changed()
            if time.monotonic() - since > PROVEN_S:
                self._failures = 0

    async def _look(self) -> None:
        """Its queue and cache, and what follows from them."""
        if last_words := self._place.ended():
            raise ServerGone(f"its process has ended. {last_words}")
        try:
            now = (await self.client.loads(timeout_s=self._options.hang_s)).total(self._retractions)
        except ServerRefused:
            return  # a version without these figures: the limit stays
        if self.state == "serving":
            self.limit, before = next_limit(self.limit, self.most, self.load, now), self.limit
            self.load = now
            if self.limit > before:
                self._changed()
        else:
            self.load = None

    async def _check(self) -> None:
        """Whether its scheduler answers, and whether it is the server, with the weights, that it was."""
        info = await self.client.server_info(timeout_s=self._options.hang_s)
        if _start_id(info) != self._start_id:
            raise ServerBroken("it was restarted, with the weights that it starts with")
        expected = self.version
        label = await self._label()
        if self.state != "serving" or expected != self.version or self._labels.version(label) == expected:
            return
        if self._labels.strange(label):
            raise Taken(f"another engine has put its weights into it: they are labelled {label!r}")
        raise ServerBroken(f"its weights are labelled {label!r} where this engine had put version {expected}")

    async def _label(self) -> str:
        info = await self.client.model_info(timeout_s=self._options.hang_s)
        return str(info.get("weight_version") or "")

    async def _refuse_if_used(self, label: str) -> None:
        """Raises Taken where another engine generates there; one that is through has left only its label."""
        if not self._labels.strange(label):
            return
        with contextlib.suppress(ServerRefused):
            for _ in range(LOOKS_IF_USED):
                load = (await self.client.loads(timeout_s=self._options.hang_s)).total()
                if load.running + load.queued == 0:
                    return
                await asyncio.sleep(LOOK_IF_USED_S)
            raise Taken(
                f"{self._place.url} is in use: its weights are labelled {label!r} and {load.running} requests run "
                "there; give each producer servers of its own"
            )

    async def _recover(self) -> None:
        """Wait before the next try, or give up: at once where it has never worked."""
        self._failures += 1
        if not self.begun.is_set():
            self._lose(self.why)
        elif self._failures > self._options.restarts:
            self._lose(f"it failed {self._failures} times in a row, the last time so: {self.why}")
        elif not await self._place.mend():
            self._lose(f"it was away for {self._options.outage_s:.0f} s: {self.why}")
        else:
            await asyncio.sleep(backoff_s(self._failures))

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


def _start_id(info: dict[str, Any]) -> str:
    """What is another one after each start of the server: how long its parts took to start, to the nanosecond."""
    return str(info.get("startup_time") or "")
