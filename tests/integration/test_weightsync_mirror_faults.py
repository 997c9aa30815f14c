"""Hosts as processes of their own: a relay that dies or stops midway holds nobody up, and the origin sends about once.

This file is also the program of a host: `python FILE URL RUN FOLDER NAME` serves what lies in its folder, and mirrors
the one version that is announced; it says its address, and "held" when it has the version.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from broker.api import Fence, Peer, Versions
from broker.connect import Run, connect_run
from headrace.config import BrokerConfig
from headrace.version import PolicyVersion
from tests.bulk import Publication, content, digests
from tests.support import wait_until
from weightsync.arena import Arena
from weightsync.bulk.server import BulkServer
from weightsync.bulk.shelf import Shelf
from weightsync.manifest import Layout, Manifest, Part, decode, encode
from weightsync.mirror import Mirror
from weightsync.transports.tcp import TcpTransport, bulk_addresses

BROKER = BrokerConfig(stream_block_ms=500, connect_timeout_s=10.0)
LAYOUT = Layout.of([("w", "bfloat16", (1 << 20, 16))], chunk_bytes=1 << 20)
LEASE_S = 60.0
STALL_S = 0.5


async def be_host(run: Run, run_id: str, arena: Arena, name: str) -> None:
    """Heartbeats once, which lasts for the test, and learns of the others before it pulls."""
    secret = await run.secret()
    server = BulkServer(arena, run_id, secret, stall_s=STALL_S)
    await run.heartbeat(Peer(name, "weights", name, os.getpid(), True, {"bulk": server.address}), LEASE_S)
    print(server.address, flush=True)
    book: dict[str, str] = {}
    transport = TcpTransport(lambda: book, secret, run_id, host=name, address=server.address, stall_s=STALL_S)
    mirror = Mirror(arena, transport, run, run_id, name, stopping=asyncio.Event(), block_ms=100)
    coming = None
    while coming is None:
        coming = (await run.wait_versions(Versions(), 500)).coming
    data = await run.manifest(coming)
    assert data is not None
    book.update(bulk_addresses(await run.peers()))
    outcome = await mirror.pull(decode(data))
    print(outcome.kind, json.dumps({"reason": outcome.reason, "bytes": outcome.full_bytes}), flush=True)
    await asyncio.Event().wait()


@dataclass
class Host:
    name: str
    arena: Arena
    process: subprocess.Popen[str]
    address: str = ""

    def said(self) -> str:
        """Its next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ready(self, version: PolicyVersion, run_id: str) -> int:
        """Chunks that are here."""
        held = Shelf(self.arena, run_id).find(version, 0, LAYOUT.nbytes, LAYOUT.chunk_bytes)
        if held is None:
            return 0
        chunks = held.segment.ready()
        held.close()
        return chunks


@dataclass
class Fleet:
    """An origin in this process and hosts in others, of one run on a real Redis."""

    run: Run
    run_id: str
    fence: Fence
    folder: Path
    url: str
    stack: ExitStack
    hosts: list[Host] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arena = Arena(self.folder / "origin")
        self.arena.folder.mkdir()

    async def start(self, count: int) -> None:
        self.server = BulkServer(self.arena, self.run_id, await self.run.secret(), stall_s=STALL_S)
        self.stack.callback(self.server.close)
        peer = Peer("origin", "weights", "origin", os.getpid(), True, {"bulk": self.server.address})
        await self.run.heartbeat(peer, LEASE_S)
        for name in [f"host-{number}" for number in range(count)]:
            arena = Arena(self.folder / name)
            arena.folder.mkdir()
            process = host_process(self.url, self.run_id, str(arena.folder), name)
            self.hosts.append(Host(name, arena, process))
            self.stack.callback(end, process)
        for host in self.hosts:
            host.address = await asyncio.to_thread(host.said)

    async def begin(self, chunks: int) -> Publication:
        version = PolicyVersion(self.fence.incarnation, 1)
        segment = self.arena.create(self.run_id, version, LAYOUT)
        data = content(LAYOUT)
        segment.data[:] = data.data
        manifest = Manifest(version, LAYOUT, (Part("origin", segment.name),), False, self.run_id)
        publication = Publication(segment, manifest, data)
        publication.grow(chunks)
        await self.run.announce(self.fence, version, encode(manifest))
        return publication

    async def seal(self, version: Publication) -> None:
        version.grow(LAYOUT.chunks(0) - version.grown)
        version.segment.seal()
        await self.run.publish_head(self.fence, version.manifest.version, encode(version.sealed))

    async def all_hold(self, hosts: list[Host], version: Publication) -> None:
        for host in hosts:
            said = await asyncio.to_thread(host.said)
            assert said.startswith("held"), said
            held = Shelf(host.arena, self.run_id).whole(version.manifest.version, 0, LAYOUT.nbytes, LAYOUT.chunk_bytes)
            assert held is not None
            out = np.zeros(LAYOUT.nbytes, np.uint8)
            held.segment.read(0, [out.data])
            held.close()
            assert np.array_equal(out, version.data)
            assert digests(LAYOUT, out) == list(version.sealed.parts[0].digests)


def host_process(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, env=environment)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture
async def fleet(run: Run, run_id: str, redis_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(run, run_id, await run.take_fence(0), tmp_path, redis_url, stack)


async def test_four_hosts_pull_a_version_as_it_is_published_and_the_origin_sends_about_once(fleet: Fleet) -> None:
    await fleet.start(4)
    version = await fleet.begin(8)
    await fleet.seal(version)
    await fleet.all_hold(fleet.hosts, version)
    assert fleet.server.stats().sent_bytes <= 2 * LAYOUT.nbytes


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_relay_that_ends_or_stops_midway_holds_nobody_up(fleet: Fleet, number: signal.Signals) -> None:
    await fleet.start(3)
    version = await fleet.begin(LAYOUT.chunks(0) // 2)
    half = version.grown
    for host in fleet.hosts:
        await wait_until(
            lambda host=host: host.ready(version.manifest.version, fleet.run_id) == half, "it has half", 60
        )
    relay = parent_of_others(fleet)
    relay.process.send_signal(number)
    await fleet.seal(version)
    await fleet.all_hold([host for host in fleet.hosts if host is not relay], version)
    # Once to the relay, as far as it came, and once to the one that took its place.
    assert fleet.server.stats().sent_bytes <= 2 * LAYOUT.nbytes


def parent_of_others(fleet: Fleet) -> Host:
    """The host that the origin sends to."""
    pulls = fleet.server._books._tracker._pulls.values()
    (first,) = [
        puller.address for pullers in pulls for puller in pullers.values() if puller.parent == fleet.server.address
    ]
    return next(host for host in fleet.hosts if host.address == first)


async def main(url: str, run_id: str, folder: str, name: str) -> None:
    await be_host(connect_run(url, run_id, BROKER), run_id, Arena(Path(folder)), name)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
