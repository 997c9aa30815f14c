"""How weights come to a producer, by its run's configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from broker.api import Peer, WeightsPort
from headrace.config import WeightsConfig
from weightsync.arena import Arena
from weightsync.bulk.pairs import usable_backends
from weightsync.transports.api import Transport
from weightsync.transports.auto import AutoTransport
from weightsync.transports.collective import CollectiveTransport
from weightsync.transports.tcp import TcpTransport, bulk_addresses


@dataclass(slots=True)
class Known:
    """Hosts to where their weight services serve."""

    addresses: dict[str, str]


async def transport_of(
    config: WeightsConfig, port: WeightsPort, run_id: str, host: str, on_kind: Callable[[str], None]
) -> Transport:
    """Raises WeightError without a folder for shared memory or the wanted backend, BrokerUnavailable."""
    arena = Arena(run_folder=(await port.record()).folder)
    if config.transport == "shm":
        return AutoTransport(arena, host, port.peers, None, on_kind)
    known = Known({})
    tcp = TcpTransport(lambda: known.addresses, await port.secret(), run_id, host=host, codec=config.codec)

    async def peers() -> list[Peer]:
        found = await port.peers()
        # Not changed in place: threads of the transport read it.
        known.addresses = bulk_addresses(found)
        tcp.downloads.secret = await port.secret()
        return found

    remote = between_hosts(tcp, await backends_of(config))
    return AutoTransport(arena, host, peers, remote, on_kind, local=config.transport != "tcp")


async def backends_of(config: WeightsConfig) -> tuple[str, ...]:
    """What pairs of this host may use; none where weights do not go by collective. Asks torch, in another process.

    Raises WeightError for a backend that is wanted and not there.
    """
    if config.transport != "collective":
        return ()
    return await asyncio.to_thread(usable_backends, config.collective_backend)


def between_hosts(tcp: TcpTransport, backends: tuple[str, ...]) -> TcpTransport | CollectiveTransport:
    return CollectiveTransport(tcp, backends) if backends else tcp
