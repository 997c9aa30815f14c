"""How weights come to a producer, by its run's configuration."""

from __future__ import annotations

from collections.abc import Callable

from broker.api import Peer, WeightsPort
from headrace.config import WeightsConfig
from weightsync.arena import Arena
from weightsync.transports.api import Transport
from weightsync.transports.auto import AutoTransport
from weightsync.transports.tcp import TcpTransport, bulk_addresses


async def transport_of(
    config: WeightsConfig, port: WeightsPort, run_id: str, host: str, on_kind: Callable[[str], None]
) -> Transport:
    """Raises WeightError without a folder for shared memory, BrokerUnavailable."""
    addresses: dict[str, str] = {}

    async def peers() -> list[Peer]:
        found = await port.peers()
        addresses.clear()
        addresses.update(bulk_addresses(found))
        return found

    remote: Transport | None = None
    if config.transport != "shm":
        remote = TcpTransport(lambda: addresses, await port.secret(), run_id, host=host)
    return AutoTransport(Arena(), host, peers, remote, on_kind, local=config.transport in ("auto", "shm"))
