"""How weights come to a producer, by its run's configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from broker.api import Peer, WeightsPort
from headrace.config import WeightsConfig
from weightsync.arena import Arena
from weightsync.bulk.pairs import usable_backends
from weightsync.transports.api import Transport
from weightsync.transports.auto import AutoTransport
from weightsync.transports.collective import CollectiveTransport
from weightsync.transports.tcp import TcpTransport, bulk_addresses


async def transport_of(
    config: WeightsConfig, port: WeightsPort, run_id: str, host: str, on_kind: Callable[[str], None]
) -> Transport:
    """Raises WeightError without a folder for shared memory or the wanted backend, BrokerUnavailable."""
    addresses: dict[str, str] = {}

    async def peers() -> list[Peer]:
        found = await port.peers()
        addresses.clear()
        addresses.update(bulk_addresses(found))
        return found

    remote: Transport | None = None
    if config.transport != "shm":
        tcp = TcpTransport(lambda: addresses, await port.secret(), run_id, host=host)
        remote = between_hosts(tcp, await backends_of(config))
    return AutoTransport(Arena(), host, peers, remote, on_kind, local=config.transport != "tcp")


async def backends_of(config: WeightsConfig) -> tuple[str, ...]:
    """What pairs of this host may use; none where weights do not go by collective. Asks torch, in another process.

    Raises WeightError for a backend that is wanted and not there.
    """
    if config.transport != "collective":
        return ()
    return await asyncio.to_thread(usable_backends, config.collective_backend)


def between_hosts(tcp: TcpTransport, backends: tuple[str, ...]) -> TcpTransport | CollectiveTransport:
    return CollectiveTransport(tcp, backends) if backends else tcp
