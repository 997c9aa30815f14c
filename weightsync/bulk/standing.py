"""What is known of each peer, shared by all downloads: its rates, whether a delta pays, whether it is to be trusted."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field

from weightsync.codecs.choice import choose

BAD_CHUNKS = 3
"""So many that did not match, and a peer is asked no more for `QUARANTINE_S`."""
QUARANTINE_S = 60.0
WEIGHT = 0.2
"""Of the newest chunk in the rate."""
MAX_PEERS = 1024


GUESSED_SHARE = 0.05
"""Of a full version that a delta is, before the first one came."""


class Mean:
    """Exponentially weighted."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else (1 - WEIGHT) * self.value + WEIGHT * value

    def rate(self, otherwise: float) -> float:
        """Of seconds per byte, bytes per second."""
        return otherwise if self.value is None else 1 / self.value if self.value > 0 else math.inf


@dataclass(slots=True)
class _Peer:
    wire: Mean = field(default_factory=Mean)
    """Seconds per byte, as all below but the share."""
    encoding: Mean = field(default_factory=Mean)
    bad: int = 0
    quarantined_until: float = 0.0


class Standing:
    """Times are any clock's, in seconds. Any thread."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}
        self._applying = Mean()
        self._share = Mean()
        self._lock = threading.Lock()

    def sent(self, address: str, nbytes: int, seconds: float) -> None:
        """A full chunk of so many bytes came within so many seconds."""
        with self._lock:
            self._peer(address).wire.add(seconds / nbytes)

    def changed(self, address: str, nbytes: int, wire_nbytes: int, encode_s: float, apply_s: float) -> None:
        """A chunk of so many bytes came as a delta."""
        with self._lock:
            self._peer(address).encoding.add(encode_s / nbytes)
            self._applying.add(apply_s / nbytes)
            self._share.add(wire_nbytes / nbytes)

    def delta_pays(self, address: str, nbytes: int) -> bool:
        """Whether this many bytes are estimated to come sooner from this peer as a delta.

        Without a measured rate of its wire: yes, since a delta costs little where the wire is fast.
        """
        with self._lock:
            peer = self._peer(address)
            share = GUESSED_SHARE if self._share.value is None else self._share.value
            wire, encoding, applying = (
                mean.rate(guess)
                for mean, guess in ((peer.wire, 0.0), (peer.encoding, math.inf), (self._applying, math.inf))
            )
        return wire == 0.0 or choose(nbytes, share * nbytes, wire, encoding, applying) != "raw"

    def rate(self, address: str) -> float:
        """Bytes per second of its wire; 0 before the first full chunk."""
        with self._lock:
            return self._peer(address).wire.rate(0.0)

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
