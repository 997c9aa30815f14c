"""The weight service as a process of its own, and what the broker knows of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from broker.api import Peer
from broker.connect import Run
from headrace.version import PolicyVersion
from weightsync.arena import Arena


@contextmanager
def service(url: str, run_id: str, arena: Arena, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """`python -m weightsync`; killed at the end if it still runs."""
    known = {"HEADRACE_REDIS_URL": url, "HEADRACE_RUN": run_id, "HEADRACE_SHM_DIR": str(arena.folder)}
    process = subprocess.Popen(
        [sys.executable, "-m", "weightsync"],
        env={**os.environ, **known, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and what it said, once it has ended by itself."""
    _, said = await asyncio.to_thread(process.communicate, timeout=30)
    return process.returncode, said


async def found(run: Run) -> Peer | None:
    """The live weight service, as the broker knows it."""
    peers = [peer for peer in await run.peers() if peer.role == "weights" and peer.alive]
    return peers[0] if peers else None


async def checked(run: Run, version: PolicyVersion) -> str | None:
    """What the service says of this head; None until it has seen it."""
    peer = await found(run)
    return peer.state["check"] if peer is not None and peer.state["head"] == str(version) else None
