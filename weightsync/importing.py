"""Importing: the loop that keeps this host's memory at the newest version, where it is published on another host.

Wait graph: it waits for news of a version (woken by the trainer's announcement or seal; at most one block), and for
`Mirror.pull`. Nobody waits for it; after a failure it tries again ever more slowly, or at once what is newer.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from broker.api import Versions, WeightsPort
from headrace.errors import WeightError, WireError
from headrace.service import Service
from headrace.telemetry.phases import Lane
from headrace.version import PolicyVersion
from weightsync.leasing import BASE, leased
from weightsync.manifest import Manifest, decode
from weightsync.mirror import Mirror, Outcome
from weightsync.staging import backoff_s, next_version

log = logging.getLogger(__name__)


class Importer:
    """Of one host's weight service."""

    def __init__(
        self,
        port: WeightsPort,
        mirror: Mirror,
        service: Service,
        name: str,
        lease_s: float,
        block_ms: int,
        refresh: Callable[[], Awaitable[object]],
        on_outcome: Callable[[Outcome], None],
        lane: Lane,
    ) -> None:
        """`refresh` learns anew where other hosts serve; `on_outcome` is told how each pull ended, `lane` that one is
        under way.
        """
        self._port = port
        self._mirror = mirror
        self._service = service
        self._name = name
        self._lease_s = lease_s
        self._block_ms = block_ms
        self._refresh = refresh
        self._on_outcome = on_outcome
        self._lane = lane
        self._done: PolicyVersion | None = None
        """The newest version that is here, or is none of other hosts'."""
        self._asked: PolicyVersion | None = None

    async def run(self) -> None:
        """Until the service stops."""
        seen = Versions()
        failed: PolicyVersion | None = None
        failures = 0
        while not self._service.stopping.is_set():
            version = next_version(seen, self._done, failed)
            if version is None:
                # What failed is tried again, once its time has come.
                wait_ms = self._block_ms if failed is None else min(self._block_ms, int(1000 * backoff_s(failures)) + 1)
                seen, failed = await self._port.wait_versions(seen, wait_ms), None
                continue
            failures = 0 if await self._import(version) else failures + 1
            failed = version if failures else None
            seen = await self._port.wait_versions(seen, 0)

    async def keep_base(self) -> None:
        """Ask the version that the next delta will be based on to be kept where it was published, too."""
        base, holder = self._mirror.base, BASE + self._name
        if self._asked is not None and self._asked != base:
            await self._port.release(self._asked, holder)
        self._asked = base
        if base is not None:
            await self._port.lease(base, holder, self._lease_s)

    async def _import(self, version: PolicyVersion) -> bool:
        """False when it should be tried again."""
        manifest = await self._manifest(version)
        if manifest is None:
            return False
        if not self._mirror.wants(manifest):
            self._mirror.holds(manifest)
        else:
            await self._refresh()
            async with leased(self._port, version, self._name, self._lease_s):
                try:
                    with self._lane.during("transfer"):
                        outcome = await self._mirror.pull(manifest)
                except WeightError as error:
                    log.error("weight version %s does not come here: %s", version, error)
                    return False
                await self.keep_base()
            self._on_outcome(outcome)
            if outcome.kind in ("vanished", "refused"):
                return False
            if outcome.kind != "held":
                return True
        self._done = version
        return True

    async def _manifest(self, version: PolicyVersion) -> Manifest | None:
        data = await self._port.manifest(version)
        try:
            return None if data is None else decode(data)
        except WireError as error:
            log.warning("manifest of weight version %s is refused: %s", version, error)
            return None
