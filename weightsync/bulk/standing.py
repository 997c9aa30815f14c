"""What is known of each peer: how fast it sends, and whether it is to be trusted. Shared by all downloads."""

from __future__ import annotations

import threading
from dataclasses import dataclass

BAD_CHUNKS = 3
"""So many that did not match, and a peer is asked no more for `QUARANTINE_S`."""
QUARANTINE_S = 60.0
WEIGHT = 0.2
"""Of the newest chunk in the rate."""
MAX_PEERS = 1024


@dataclass(slots=True)
class _Peer:
    rate: float = 0.0
    bad: int = 0
    quarantined_until: float = 0.0


class Standing:
    """Times are any clock's, in seconds. Any thread."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}
        self._lock = threading.Lock()

    def sent(self, address: str, nbytes: int, seconds: float) -> None:
        """A chunk of so many bytes came."""
        with self._lock:
            peer = self._peer(address)
            rate = nbytes / max(seconds, 1e-9)
            peer.rate = rate if peer.rate == 0.0 else (1 - WEIGHT) * peer.rate + WEIGHT * rate

    def rate(self, address: str) -> float | None:
        """Bytes per second, exponentially weighted; None before the first chunk."""
        peer = self._peers.get(address)
        return peer.rate if peer is not None and peer.rate > 0.0 else None

    def bad(self, address: str, now: float) -> None:
        """It sent something that does not match."""
        with self._lock:
            peer = self._peer(address)
            peer.bad += 1
            if peer.bad >= BAD_CHUNKS:
                peer.bad, peer.quarantined_until = 0, now + QUARANTINE_S

    def trusted(self, address: str, now: float) -> bool:
        peer = self._peers.get(address)
        return peer is None or peer.quarantined_until <= now

    def _peer(self, address: str) -> _Peer:
        peer = self._peers.setdefault(address, _Peer())
        while len(self._peers) > MAX_PEERS:
            del self._peers[next(iter(self._peers))]
        return peer
