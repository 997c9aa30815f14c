"""Versions: what the trainer publishes, and publishes again where it found no room or Redis forgot it."""

from __future__ import annotations

from consumers.claim import Claim
from consumers.evaluations import Evaluations
from consumers.parts import Parts
from consumers.progress import Progress
from consumers.ranks.orders import Publish
from consumers.worker import Worker
from headrace.telemetry.clock import now
from headrace.version import PolicyVersion
from weightsync.publisher import Publisher


class Versions:
    """One at a time, by the train loop only."""

    def __init__(
        self,
        claim: Claim,
        parts: Parts,
        publisher: Publisher,
        progress: Progress,
        worker: Worker,
        evaluations: Evaluations,
    ) -> None:
        self._evaluations = evaluations
        self._port = claim.port
        self._parts = parts
        self._publisher = publisher
        self._worker = worker
        self._progress = progress
        self._announced = 0
        """How often Redis had been made whole when the head was announced last."""
        self._told = 0
        """The same of the version that is evaluated, which may be an older one."""
        self.unpublished: PolicyVersion | None = None
        """The newest one, while no segment is free for it."""

    async def publish(self, version: PolicyVersion) -> None:
        """Raises WeightError, Fenced, BrokerUnavailable."""
        mended = self._port.mended
        begin = now()
        with self._parts.lane.during("weight_publish"):
            await self._worker(lambda: self._parts.ranks.tell(Publish(version)))
            done = await self._publisher.publish(version, self._parts.trainer.rows())
        nbytes = self._parts.layout.nbytes
        self._progress.note("publish", version=str(version), begin=begin, end=now(), nbytes=nbytes, published=done)
        self.unpublished = None if done else version
        if done:
            self._announced = mended
        else:
            self._progress.event("publish_skipped", version=str(version))

    def give_up(self) -> None:
        """The weights are about to become others than those of a version that found no room yet."""
        self.unpublished = None

    async def keep(self) -> None:
        """Publish what found no room; announce the newest one again to a Redis that came back without it."""
        mended = self._port.mended
        if mended > self._announced:
            self._announced = mended
            await self._publisher.announce_again()
            self._progress.event("announced_again", mended=self._announced)
        if mended > self._told:
            self._told = mended
            await self._evaluations.announce_again()
        if self.unpublished:
            await self.publish(self.unpublished)
