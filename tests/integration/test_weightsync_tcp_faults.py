"""Every fault of a wire or of a sender: what arrives is the version bit by bit, or nothing.

This file is also the program of senders: `python FILE FOLDER` serves what lies there, and says its address.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.version import PolicyVersion
from tests.bulk import LAYOUT, RUN, VERSION, Publication, Site, Sites, Wire, content, digests, pull
from tests.support import wait_until
from weightsync.arena import Arena
from weightsync.bulk.auth import HELLO_BYTES, PROOF_BYTES
from weightsync.bulk.frames import HEADER_BYTES
from weightsync.bulk.server import BulkServer
from weightsync.digests import Pace
from weightsync.manifest import Layout, Manifest, Part
from weightsync.placement import Placement
from weightsync.transports.api import Unavailable
from weightsync.transports.tcp import TcpTransport

SECRET = b"fault-secret-of-thirty-two-bytes"
BIG = Layout.of([("w", "bfloat16", (1 << 20, 32))], chunk_bytes=1 << 20)
STALL_S = 0.2
HANDSHAKE = HELLO_BYTES + PROOF_BYTES


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Sites]:
    made = Sites(tmp_path)
    yield made
    made.close()


def through(site: Site, **fault: int) -> Wire:
    """Everybody reaches this site by a wire with a fault."""
    wire = Wire(site.server.address, **fault)
    site.server.address = site.book[site.name] = wire.address
    return wire


async def arrives(version: Publication, here: Site, *, sealed: bool = True) -> None:
    """All of it, in the end."""
    transport = here.transport(relay=False, stall_s=STALL_S)
    source = await transport.open(version.sealed if sealed else version.manifest, 0)
    assert not isinstance(source, Unavailable)
    assert np.array_equal(await pull(source), version.data)
    await source.close()
    await transport.close()


def offsets(limit: int) -> list[int]:
    """Of what the server says until the second chunk: every byte of its frames, and some of the first chunk."""
    parents = HANDSHAKE + HEADER_BYTES
    frames = [*range(0, HANDSHAKE, 5), *range(HANDSHAKE, limit, 3)]
    return [at for at in frames if at < parents + 80 + HEADER_BYTES or at % 97 < 3]


async def test_a_segment_that_is_cut_while_it_is_sent_ends_the_connection_only(sites: Sites) -> None:
    origin, here = sites("origin", wait_s=30.0), sites("here")
    version = origin.publish(chunks=2)
    transport = here.transport()
    source = await transport.open(version.manifest, 0)
    assert not isinstance(source, Unavailable)
    place = Placement(LAYOUT, 0, np.zeros(LAYOUT.nbytes, np.uint8))
    assert len(await source.fetch(range(7), place, Pace())) == 2  # type: ignore[arg-type]
    waiting = asyncio.create_task(source.fetch(range(2, 7), place, Pace()))
    await wait_until(lambda: origin.server.uploads == 1, "it is asked")
    os.truncate(origin.arena.folder / version.segment.name, 0)
    assert isinstance(await waiting, Unavailable)
    await source.close()
    await transport.close()
    await wait_until(lambda: origin.server.connections == 0, "the server has let go")
    other = origin.publish(PolicyVersion(1, 8))
    source = await (again := here.transport()).open(other.sealed, 0)
    assert not isinstance(source, Unavailable)
    assert np.array_equal(await pull(source), other.data), "it serves on"
    await source.close()
    await again.close()


@pytest.mark.parametrize("part", range(4))
async def test_a_byte_that_changes_on_the_way_is_noticed_and_fetched_again(sites: Sites, part: int) -> None:
    origin, here = sites("origin"), sites("here")
    version = origin.publish()
    where = origin.server.address
    for at in offsets(HANDSHAKE + 2 * HEADER_BYTES + 80 + LAYOUT.chunk_bytes)[part::4]:
        origin.server.address = where
        wire = through(origin, flip=at)
        await arrives(version, here, sealed=part % 2 == 0)
        assert wire.hits == 1, f"byte {at} was never said"
        wire.close()
    origin.server.address = where


async def test_a_changed_byte_of_a_request_does_no_harm(sites: Sites) -> None:
    origin, here = sites("origin"), sites("here")
    version = origin.publish()
    where = origin.server.address
    for at in [0, 20, HELLO_BYTES + 3, *range(HANDSHAKE, HANDSHAKE + 40, 2)]:
        origin.server.address = where
        wire = through(origin, flip_request=at)
        await arrives(version, here)
        assert wire.hits == 1, f"byte {at} was never said"
        wire.close()
    origin.server.address = where


async def test_a_connection_that_ends_anywhere_is_made_again(sites: Sites) -> None:
    origin, here = sites("origin"), sites("here")
    version = origin.publish()
    where = origin.server.address
    measured = through(origin)
    await arrives(version, here)
    parents = measured.said - HANDSHAKE - LAYOUT.chunks(0) * HEADER_BYTES - LAYOUT.nbytes - HEADER_BYTES
    measured.close()
    frames = [0, HELLO_BYTES, HANDSHAKE, HANDSHAKE + HEADER_BYTES, HANDSHAKE + parents]
    for bound in Placement(LAYOUT, 0, np.zeros(LAYOUT.nbytes, np.uint8)).bounds:
        frames += [frames[-1] + HEADER_BYTES, frames[-1] + HEADER_BYTES + bound[1] - bound[0]]
    for at in sorted({max(0, edge + shift) for edge in frames for shift in (-1, 0, 1)}):
        origin.server.address = where
        wire = through(origin, cut=at)
        await arrives(version, here)
        wire.close()
    origin.server.address = where


async def test_chunks_that_do_not_match_the_manifest_come_from_another_peer(sites: Sites) -> None:
    """The origin's memory was damaged after it was digested; a relay has the right bytes."""
    origin, relay, here = sites("origin"), sites("relay"), sites("here")
    version = origin.publish()
    copy = relay.publish()
    damaged = origin.arena.folder / version.segment.name
    with damaged.open("r+b") as file:
        file.seek(LAYOUT.chunk_bytes * 2)
        file.write(b"damage")
    assert np.array_equal(copy.data, version.data)
    await arrives(version, here)
    assert relay.server.stats().chunks > 0


async def test_a_peer_with_three_bad_chunks_is_left_alone(sites: Sites) -> None:
    origin, here = sites("origin"), sites("here")
    version = origin.publish()
    wrong = replace(version.sealed.parts[0], digests=tuple(bytes(16) for _ in version.sealed.parts[0].digests))
    transport = here.transport(stall_s=0.05, patience_s=0.5)
    source = await transport.open(replace(version.sealed, parts=(wrong,)), 0)
    assert not isinstance(source, Unavailable)
    place = Placement(LAYOUT, 0, np.zeros(LAYOUT.nbytes, np.uint8))
    answer: list[bytes] | Unavailable = []
    while answer == []:
        answer = await source.fetch(range(7), place, Pace())
    assert isinstance(answer, Unavailable)
    assert "not what the manifest says" in answer.reason
    # Each time it was asked it sent more than the one chunk that was looked at.
    assert origin.server.stats().connections <= 4
    await source.close()
    await transport.close()


# -- senders in processes of their own


class Sender:
    """A bulk server in a process of its own, over a folder with one whole version."""

    def __init__(self, folder: Path, name: str) -> None:
        self.arena = Arena(folder / name)
        self.arena.folder.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(self.arena.folder)], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def fill(self) -> None:
        segment = self.arena.create(RUN, VERSION, BIG)
        data = content(BIG)
        segment.data[:] = data.data
        segment.grow(digests(BIG, data))
        segment.seal()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def senders(tmp_path: Path) -> Iterator[dict[str, Sender]]:
    with ExitStack() as stack:
        made = {name: Sender(tmp_path, name) for name in ("first", "second")}
        for sender in made.values():
            stack.callback(sender.end)
            sender.fill()
        yield made


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_sender_that_ends_or_stops_midway_is_replaced_by_another(
    senders: dict[str, Sender], sites: Sites, number: signal.Signals
) -> None:
    here = sites("here")
    here.book.update({name: sender.address for name, sender in senders.items()})
    data = content(BIG)
    manifest = Manifest(VERSION, BIG, (Part("first", "", tuple(digests(BIG, data))),), True, RUN)
    transport = TcpTransport(lambda: here.book, SECRET, RUN, host="here", address=here.server.address, stall_s=0.5)
    source = await transport.open(manifest, 0)
    assert not isinstance(source, Unavailable)
    out = np.zeros(BIG.nbytes, np.uint8)
    place = Placement(BIG, 0, out)
    at = 0
    while at < BIG.chunks(0):
        got = await source.fetch(range(at, min(at + 4, BIG.chunks(0))), place, Pace())
        assert not isinstance(got, Unavailable), got.reason
        if at == 0:
            senders["first"].send(number)
        at += len(got)
    assert np.array_equal(out, data)
    await source.close()
    await transport.close()


if __name__ == "__main__":
    server = BulkServer(Arena(Path(sys.argv[1])), RUN, SECRET)
    print(server.address, flush=True)
    asyncio.run(asyncio.Event().wait())  # type: ignore[arg-type]
