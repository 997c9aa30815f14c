"""One completion server: what `producers/engines/remote/replica.py` asks of it."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

from headrace.errors import EngineError
from producers.engines.openai.answers import Completed, generated
from producers.engines.openai.asking import PLAIN, completion_body
from producers.engines.openai.client import CompletionsClient
from producers.engines.openai.options import Options
from producers.engines.openai.probing import PROMPTS, Found, probe
from producers.engines.openai.updates import Updater, refuse_without_routes
from producers.engines.remote.answers import Finish, Generated, Meta
from producers.engines.remote.http import ServerBroken, ServerGone, ServerRefused
from producers.engines.remote.job import Job
from producers.engines.remote.replica import Offer, Replica, Taken
from producers.engines.remote.spans import Labels

log = logging.getLogger(__name__)

CONNECT_S = 30.0
"""For a server to answer for the first time."""
RECEIVED_S = 0.1
"""After a request, before its server is paused: one that comes to a paused server waits there, and is taken back."""
QUIET_S = 0.5
"""A paused server answers at once what it was computing. When nothing came for so long, the rest waits there."""
_NOT_BEGUN = Generated([], Meta(Finish("abort")))
"""The answer to a request that was taken back."""


class CompletionsReplica(Replica):
    """One that is given by its URL."""

    def __init__(
        self, url: str, key: str, options: Options, labels: Labels, slots: int, changed: Callable[[], None]
    ) -> None:
        """`slots`: requests open there at most."""
        super().__init__(url, options, labels, slots, changed)
        self.found: Found | None = None
        self.client = CompletionsClient(url, key)
        self._options = options
        self._updates = options.updates != "none"
        self._updater = Updater(self.client, options.verify)
        self._calls: set[asyncio.Task[Completed]] = set()
        """Requests whose answers are waited for."""
        self._asked_at = 0.0
        self._answers = 0

    def answered(self, retractions: int) -> None:
        super().answered(retractions)
        self._answers += 1

    async def ask(self, job: Job, rid: str, label: str) -> Generated:
        assert self.found is not None
        label = label if self._updates else ""
        body = completion_body(job, self.found.model, rid, label, seeded=self._options.seeds)
        call = asyncio.create_task(self.client.complete(body))
        self._calls.add(call)
        self._asked_at = time.monotonic()
        try:
            await asyncio.wait([call])
            return _NOT_BEGUN if call.cancelled() else generated(call.result())
        finally:
            self._calls.discard(call)
            call.cancel()

    async def abort(self, rid: str) -> None:
        if not self._updates:
            raise ServerRefused("this server knows no request by its id", 404)
        await self.client.abort_requests([f"cmpl-{rid}-0"])

    async def _begin(self) -> None:
        if not await self._comes_back(CONNECT_S):
            # Once more, for the reason.
            await self.client.health(timeout_s=self._options.hang_s)
        if self._updates:
            await refuse_without_routes(self.client)
            if await self.client.is_paused(timeout_s=self._options.hang_s):
                # Nothing is sampled before it has a version of ours; but what is asked at start is answered.
                log.warning("server %s was left paused by an update that came to no end; it is resumed", self.name)
                await self.client.resume()
        self.found = await probe(self.client, self._options.model, salted=self._updates)

    async def _bring(self, offer: Offer, *, reload: bool) -> float:
        label, seconds = self._labels.of(offer.version), 0.0
        if self._updates:
            if offer.staged is None:
                await self.client.update_weight_version(label)
            else:
                await asyncio.sleep(self._asked_at + RECEIVED_S - time.monotonic())
                seconds = await self._updater.update(offer.staged, label, self._answered, whole=reload)
            if (found := await self._label()) != label:
                raise ServerBroken(f"it says that it is on {found!r} after an update to {label!r}")
        self.version = offer.version
        return seconds

    async def _look(self) -> None:
        await self.client.health(timeout_s=self._options.hang_s)

    async def _check(self) -> None:
        if not self._updates:
            if self.open or self._doubt.is_set():
                await self._samples()
            return
        expected, label = self.version, await self._label()
        if self.state != "serving" or expected != self.version or self._labels.version(label) == expected:
            return
        if self._labels.strange(label):
            raise Taken(f"another engine has put its weights into it: they are labelled {label!r}")
        raise ServerBroken(f"it was restarted: its weights are labelled {label!r}, not {self._labels.owner}/{expected}")

    async def _mend(self) -> bool:
        return await self._comes_back(self._options.outage_s)

    async def _end(self) -> None:
        await self.client.close()

    async def _answered(self) -> None:
        """Until nothing is open at the paused server: it has come back, or is taken back."""
        while open_there := [call for call in self._calls if not call.done()]:
            done, _ = await asyncio.wait(open_there, timeout=QUIET_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                for call in open_there:
                    call.cancel()

    async def _label(self) -> str:
        return await self.client.weight_version(timeout_s=self._options.hang_s)

    async def _samples(self) -> None:
        """Whether it answers anything: else one token, which may have to wait there for a slot."""
        assert self.found is not None
        before = self._answers
        body = {**PLAIN, "model": self.found.model, "prompt": list(PROMPTS[0]), "max_tokens": 1}
        try:
            await self.client.complete(body, timeout_s=self._options.hang_s)
        except ServerGone:
            if self._answers == before:
                raise

    async def _comes_back(self, seconds: float) -> bool:
        """Whether it answers within so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                await self.client.health(timeout_s=min(self._options.hang_s, seconds))
            except EngineError:
                if time.monotonic() > deadline:
                    return False
                await asyncio.sleep(random.uniform(0.3, 0.6))
            else:
                return True
