"""How the bytes of a version reach a buffer; `TRANSPORTS` names the ways."""

from __future__ import annotations

TRANSPORTS = {
    "shm": "weightsync.transports.shm:ShmTransport",
    "memory": "weightsync.transports.memory:MemoryTransport",
}
"""Name to `module:class`, imported when chosen."""

KINDS = ("shm", "tcp", "collective-nccl", "collective-ucc", "collective-gloo")
"""How weights may come, as journals and metrics say it."""
