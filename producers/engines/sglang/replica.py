"""One SGLang server: what `producers/engines/remote/replica.py` asks of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from producers.engines.remote.answers import Generated
from producers.engines.remote.job import Job
from producers.engines.remote.refill import Load, ceiling, next_limit
from producers.engines.remote.replica import Offer, Replica, Taken
from producers.engines.remote.spans import Labels
from producers.engines.sglang.asking import generate_body
from producers.engines.sglang.client import ServerBroken, ServerGone, ServerRefused, SglangClient
from producers.engines.sglang.loading import capabilities
from producers.engines.sglang.options import Options
from producers.engines.sglang.place import Place
from producers.engines.sglang.updates import Updater

LOOKS_IF_USED, LOOK_IF_USED_S = 50, 0.1
"""Requests that somebody has just given up are there for a moment still."""
IDLE_LOOKS = 4
"""In a row without any; one that is used may have none between two."""


class SglangReplica(Replica):
    """One that is started here, or given by its URL."""

    def __init__(
        self, name: str, place: Place, options: Options, labels: Labels, slots: int, changed: Callable[[], None]
    ) -> None:
        """`slots`: requests open there at most."""
        super().__init__(name, options, labels, slots, changed)
        self.load: Load | None = None
        self.most = slots
        self.running = slots
        """Requests that it computes at once."""
        self.info: dict[str, Any] = {}
        self._place, self._options = place, options
        self._updater: Updater | None = None
        self._retractions = 0
        self._start_id = ""

    @property
    def client(self) -> SglangClient:
        return self._place.client

    async def ask(self, job: Job, rid: str, label: str) -> Generated:
        seeded = bool(self.info.get("enable_deterministic_inference"))
        return await self.client.generate(generate_body(job, rid, label, seeded=seeded))

    async def abort(self, rid: str) -> None:
        await self.client.abort_request(rid)

    def answered(self, retractions: int) -> None:
        super().answered(retractions)
        self._retractions += retractions

    async def _begin(self) -> None:
        self.info = await self._place.open()
        self._start_id = _start_id(self.info)
        if not self.begun.is_set():
            await self._refuse_if_used(await self._label())
        if self._updater is not None:
            await self._updater.close()
        options = self._options
        found = await capabilities(self.client, self.info)
        self._updater = Updater(self.client, found, options.kv, options.means, options.verify)
        running = int(self.info.get("max_running_requests") or 0) * int(self.info.get("dp_size") or 1)
        self.running = running or self._slots
        self.limit = self.most = ceiling(self._slots, running)

    async def _bring(self, offer: Offer, *, reload: bool) -> float:
        """The label is looked at, too: what answers must be what was told."""
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
        self.load = None if reload else self.load
        return seconds

    async def _look(self) -> None:
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

    async def _mend(self) -> bool:
        return await self._place.mend()

    async def _end(self) -> None:
        if self._updater is not None:
            await self._updater.close()
        await self._place.close()

    async def _label(self) -> str:
        info = await self.client.model_info(timeout_s=self._options.hang_s)
        return str(info.get("weight_version") or "")

    async def _refuse_if_used(self, label: str) -> None:
        """Raises Taken where another engine generates there; one that is through has left only its label."""
        if not self._labels.strange(label):
            return
        with contextlib.suppress(ServerRefused):
            idle = 0
            for _ in range(LOOKS_IF_USED):
                load = (await self.client.loads(timeout_s=self._options.hang_s)).total()
                idle = 0 if load.running + load.queued else idle + 1
                if idle == IDLE_LOOKS:
                    return
                await asyncio.sleep(LOOK_IF_USED_S)
            raise Taken(
                f"{self._place.url} is in use: its weights are labelled {label!r} and {load.running} requests run "
                "there; give each producer servers of its own"
            )


def _start_id(info: dict[str, Any]) -> str:
    """What is another one after each start of the server: how long its parts took to start, to the nanosecond."""
    return str(info.get("startup_time") or "")
