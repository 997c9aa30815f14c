"""What a weight service has for other hosts: a server of its own chunks, and a mirror that brings theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from broker.api import WeightsPort
from headrace.config import WeightsConfig
from headrace.service import Service
from headrace.telemetry.phases import Lane
from weightsync.arena import Arena
from weightsync.bulk.server import BulkServer
from weightsync.choosing import between_hosts
from weightsync.importing import Importer
from weightsync.mirror import Mirror, Outcome
from weightsync.transports.tcp import TcpTransport, bulk_addresses


class Between:
    """Of one service."""

    def __init__(
        self,
        arena: Arena,
        port: WeightsPort,
        secret: bytes,
        run_id: str,
        host: str,
        config: WeightsConfig,
        block_ms: int,
        stopping: asyncio.Event,
        backends: tuple[str, ...] = (),
    ) -> None:
        """Listens from now on; `backends` as `choosing.backends_of` says. Raises WeightError where it cannot."""
        anywhere = config.bind in ("0.0.0.0", "::")  # noqa: S104 - the user's own word
        self.server = BulkServer(
            arena,
            run_id,
            secret,
            host=config.bind,
            advertise=host if anywhere else config.bind,
            upload_slots=config.upload_slots,
            backends=backends,
        )
        self._addresses: dict[str, str] = {}
        self._tcp = TcpTransport(
            lambda: self._addresses,
            secret,
            run_id,
            host=host,
            address=self.server.address,
            codec=config.codec,
            deltas=self.server.deltas,
        )
        self._transport = between_hosts(self._tcp, backends)
        self.mirror = Mirror(arena, self._transport, port, run_id, host, stopping=stopping, block_ms=block_ms)

    def importer(
        self,
        port: WeightsPort,
        service: Service,
        name: str,
        lease_s: float,
        block_ms: int,
        on_outcome: Callable[[Outcome], None],
        lane: Lane,
    ) -> Importer:
        return Importer(
            port, self.mirror, service, name, lease_s, block_ms, lambda: self.refresh(port), on_outcome, lane
        )

    async def refresh(self, port: WeightsPort) -> None:
        """Learn where other hosts serve, and the secret where Redis had lost it."""
        self._addresses = bulk_addresses(await port.peers())
        self.server.secret = self._tcp.downloads.secret = await port.secret()

    def state(self) -> dict[str, Any]:
        """For the heartbeat."""
        progress, sent = self.mirror.progress, self.server.stats()
        coming = f"{progress.version}: {progress.chunks} of {progress.of} chunks" if progress else ""
        return {
            "bulk": self.server.address,
            "coming": coming,
            "transport": self._transport.kind,
            "sent_bytes": sent.sent_bytes,
            "uploads": self.server.uploads,
        }

    async def close(self) -> None:
        await self._transport.close()
        await self.mirror.close()
        await asyncio.to_thread(self.server.close)
