"""The watch: whether anybody plays for this run, and whether tasks are overdue."""

from __future__ import annotations

import time

from broker.api import Peer
from broker.messages import Task
from consumers.claim import Claim
from consumers.muster import Muster
from consumers.progress import Progress
from consumers.troubles import Troubles
from headrace.config import Config


class Watch:
    """Looks once per beat."""

    def __init__(self, claim: Claim, config: Config, progress: Progress, troubles: Troubles) -> None:
        self._claim = claim
        self._port = claim.port
        self._progress = progress
        self._troubles = troubles
        self._grace_ms = round(config.producer.lease_s * 1000)
        self._asked_at = time.monotonic()
        self._limit_s = config.trainer.without_producers_s if config.trainer.without_producers == "end" else None
        self._muster = Muster(time.monotonic(), time.monotonic())

    @property
    def deserted(self) -> str:
        """Why the run is to end: it was without a producer for too long. Empty while it is not to."""
        missed_s = self._muster.missed_s
        if self._limit_s is None or missed_s < self._limit_s:
            return ""
        return (
            f"no producer has played for this run for {missed_s:.0f} s (trainer.without_producers_s); "
            "`headrace up --resume` goes on with it"
        )

    async def look(self, *, leaving: bool) -> list[Task]:
        """Returns tasks that are overdue by more than a lease of a producer: whoever has them is stuck.

        Looked for once in a lease, and only while a producer is there: without one they are held by nobody, and the
        run waits. A trainer that is `leaving` misses no producers: they leave, too. Raises Fenced, BrokerUnavailable.
        """
        peers = await self._port.peers()
        if not leaving:
            self._muster_producers(peers)
        self.note(peers)
        self._progress.elsewhere(peers)
        self._progress.broker(await self._port.balance(), await self._port.depths(), *await self._port.memory())
        now = time.monotonic()
        alive = any(peer.alive for peer in peers if peer.role == "producer")
        if not alive or now - self._asked_at < self._grace_ms / 1000:
            return []
        self._asked_at = now
        return await self._port.overdue(self._grace_ms)

    def note(self, peers: list[Peer]) -> None:
        """What the run holds and misses now, for the metrics and the line of the next step."""
        books = self._claim.books
        self._progress.standing(books.retained.nbytes, self._port.mended, books.lost, peers)

    def _muster_producers(self, peers: list[Peer]) -> None:
        alive = sum(peer.alive for peer in peers if peer.role == "producer")
        said = self._muster.look(alive, time.monotonic())
        if said == "gone":
            self._progress.event("producers_gone", met=self._muster.met)
            self._troubles.begin("producers", self._muster.sentence(self._limit_s))
        elif said == "back":
            self._progress.event("producers_back", alive=alive)
            self._troubles.end("producers")
