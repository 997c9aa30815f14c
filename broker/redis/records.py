"""JSON forms of what is kept under a run's record and in its heartbeats."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from broker.api import Peer, RunRecord
from headrace.errors import WireError

_ROLES = ("producer", "trainer", "weights", "launcher", "rank")


def encode_record(record: RunRecord) -> bytes:
    return json.dumps(asdict(record), separators=(",", ":")).encode()


def decode_record(raw: bytes) -> RunRecord:
    """Raises WireError for what another release wrote and this one does not understand."""
    try:
        fields: dict[str, Any] = json.loads(raw)
        return RunRecord(**fields)
    except (ValueError, TypeError) as error:
        raise WireError("the run's record was written by a release that this one does not understand") from error


def encode_peer(peer: Peer) -> bytes:
    fields = {"role": peer.role, "host": peer.host, "pid": peer.pid, "state": peer.state}
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_peer(name: str, raw: bytes, alive: bool) -> Peer | None:
    """None for what no service wrote."""
    try:
        fields = json.loads(raw)
        peer = Peer(name, fields["role"], str(fields["host"]), int(fields["pid"]), alive, dict(fields["state"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return peer if peer.role in _ROLES else None
