"""How the bytes of a version reach a buffer."""

from __future__ import annotations

KINDS = ("shm", "tcp", "collective-nccl", "collective-ucc", "collective-gloo")
"""How weights may come, as journals and metrics say it."""
