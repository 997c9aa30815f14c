"""Chunks over TCP, with real sockets: whole and unsealed versions, several parts, slots, cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from broker.api import Peer
from headrace.version import PolicyVersion
from tests.bulk import LAYOUT, RUN, SECRET, VERSION, Sites, content, digests, pull
from tests.support import wait_here, wait_until
from weightsync.bulk.client import Connection
from weightsync.bulk.frames import Get, Status
from weightsync.bulk.sockets import wait_for
from weightsync.digests import Pace
from weightsync.manifest import Layout, Manifest, Part
from weightsync.placement import Placement
from weightsync.transports.api import Unavailable
from weightsync.transports.tcp import THREADS, TcpTransport, bulk_addresses

BIG = Layout.of([("w", "bfloat16", (1 << 20, 16))], chunk_bytes=1 << 20)
"""More than what sockets hold by themselves."""


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Sites]:
    made = Sites(tmp_path)
    yield made
    made.close()


async def test_a_version_comes_whole_and_verified(sites: Sites) -> None:
    origin, here = sites("origin"), sites("here")
    version = origin.publish()
    transport = here.transport()
    source = await transport.open(version.sealed, 0)
    assert not isinstance(source, Unavailable)
    assert np.array_equal(await pull(source), version.data)
    await source.close()
    await source.close()
    await transport.close()
    stats = origin.server.stats()
    assert (stats.sent_bytes, stats.chunks) == (LAYOUT.nbytes, LAYOUT.chunks(0))
    assert (stats.refused, stats.invalid, stats.stalled) == (0, 0, 0)


async def test_fetch_answers_the_digests_of_what_came(sites: Sites) -> None:
    origin, here = sites("origin"), sites("here")
    version = origin.publish()
    transport = here.transport()
    source = await transport.open(version.manifest, 0)
    assert not isinstance(source, Unavailable)
    out = np.zeros(LAYOUT.nbytes, np.uint8)
    got = await source.fetch(range(2, 4), Placement(LAYOUT, 0, out), Pace(0.9))
    assert got == digests(LAYOUT, version.data)[2:4]
    expected = np.zeros_like(out)
    expected[2048:4096] = version.data[2048:4096]
    assert np.array_equal(out, expected), "nothing but these chunks was written"
    await source.close()
    await transport.close()


async def test_an_unsealed_version_streams_as_it_comes(sites: Sites) -> None:
    origin, here = sites("origin", wait_s=0.3), sites("here")
    version = origin.publish(chunks=2)
    transport = here.transport()
    source = await transport.open(version.manifest, 0)
    assert not isinstance(source, Unavailable)
    out = np.zeros(LAYOUT.nbytes, np.uint8)
    place = Placement(LAYOUT, 0, out)
    assert len(await source.fetch(range(7), place, Pace())) == 2  # type: ignore[arg-type]
    assert await source.fetch(range(2, 7), place, Pace()) == []
    waiting = asyncio.create_task(source.fetch(range(2, 7), place, Pace()))
    await wait_until(lambda: origin.server.uploads == 1, "it is asked")
    version.grow(5)
    assert len(await waiting) == 5  # type: ignore[arg-type]
    assert np.array_equal(out, version.data)
    await source.close()
    await transport.close()


async def test_each_part_comes_from_its_host_into_the_rows_of_its_rank(sites: Sites) -> None:
    layout = replace(LAYOUT, parts=2)
    hosts, here = [sites("one"), sites("two")], sites("here")
    parts = []
    for number, host in enumerate(hosts):
        segment = host.arena.create(RUN, VERSION, layout, number)
        data = content(layout, 5, number)
        segment.data[:] = data.data
        segment.grow(digests(layout, data))
        segment.seal()
        parts.append(Part(host.name, segment.name, tuple(digests(layout, data))))
    manifest = Manifest(VERSION, layout, tuple(parts), True, RUN)
    transport = here.transport()
    out = np.zeros(layout.nbytes, np.uint8)
    for number in range(2):
        source = await transport.open(manifest, number)
        assert not isinstance(source, Unavailable)
        place = Placement(layout, number, out)
        at = 0
        while at < len(place.bounds):
            got = await source.fetch(range(at, len(place.bounds)), place, Pace())
            assert isinstance(got, list)
            at += len(got)
        await source.close()
        joined = b"".join(bytes(view) for chunk in range(len(place.bounds)) for view in place.views(chunk))
        # Gaps between tensors lead nowhere; everything else is there.
        assert len(joined) == layout.part_nbytes(number)
    for number, part in enumerate(parts):
        views = Placement(layout, number, out)
        mine = [v for chunk in range(len(views.bounds)) for v in views.views(chunk)]
        theirs = memoryview(content(layout, 5, number).data)
        at = 0
        for view in mine:
            if len(view) >= 64:
                assert view == theirs[at : at + len(view)], part.host
            at += len(view)
    await transport.close()


async def test_a_version_that_is_gone_is_unavailable_with_a_reason(sites: Sites) -> None:
    sites("origin")
    transport = sites("here").transport()
    manifest = Manifest(VERSION, LAYOUT, (Part("origin", "s"),), False, RUN)
    source = await transport.open(manifest, 0)
    assert not isinstance(source, Unavailable)
    answer = await source.fetch(range(3), Placement(LAYOUT, 0, np.zeros(LAYOUT.nbytes, np.uint8)), Pace())
    assert isinstance(answer, Unavailable)
    assert "does not have it" in answer.reason
    await source.close()
    await transport.close()


async def test_without_any_address_a_version_is_unavailable_with_a_reason(sites: Sites) -> None:
    here = sites("here")
    transport = here.transport()
    manifest = Manifest(VERSION, LAYOUT, (Part("nowhere", "s"),), False, RUN)
    answer = await transport.open(manifest, 0)
    assert isinstance(answer, Unavailable)
    assert "host nowhere" in answer.reason
    await transport.close()


async def test_a_version_of_another_size_is_not_sent(sites: Sites) -> None:
    origin, here = sites("origin"), sites("here")
    version = origin.publish()
    other = Layout.of([("a", "bfloat16", (640, 41))], chunk_bytes=1024)
    transport = here.transport()
    source = await transport.open(replace(version.manifest, layout=other), 0)
    assert not isinstance(source, Unavailable)
    assert isinstance(
        await source.fetch(range(1), Placement(other, 0, np.zeros(other.nbytes, np.uint8)), Pace()), Unavailable
    )
    await source.close()
    await transport.close()


@pytest.mark.parametrize("begun", [True, False])
async def test_a_fetch_that_is_cancelled_has_ended_and_holds_no_slot(sites: Sites, begun: bool) -> None:
    """Whatever it waits for, and also when no thread had begun it."""
    origin, here = sites("origin", wait_s=900.0), sites("here")
    version = origin.publish(chunks=1)
    transport = here.transport(stall_s=900.0)
    source = await transport.open(version.manifest, 0)
    assert not isinstance(source, Unavailable)
    place = Placement(LAYOUT, 0, np.zeros(LAYOUT.nbytes, np.uint8))
    assert await source.fetch(range(1), place, Pace())
    free = threading.Event()
    for _ in range(0 if begun else THREADS):
        transport._threads.submit(free.wait)
    fetching = asyncio.create_task(source.fetch(range(1, 3), place, Pace()))
    if begun:
        await wait_until(lambda: waits_for_network(transport), "it waits for the second chunk")
    else:
        await wait_until(lambda: transport._threads._work_queue.qsize() == 1, "it waits for a thread")
    fetching.cancel()
    # The loop takes that up before a thread is free.
    await asyncio.sleep(0)
    free.set()
    ended, _ = await asyncio.wait([fetching], timeout=60)
    if not ended:
        origin.server.close()
    assert ended
    assert fetching.cancelled()
    await source.close()
    await transport.close()
    await wait_until(lambda: origin.server.connections == 0, "the connection is closed")


def waits_for_network(transport: TcpTransport) -> bool:
    threads = {thread.ident for thread in transport._threads._threads}
    return any(ident in threads and frame.f_code is wait_for.__code__ for ident, frame in sys._current_frames().items())


async def test_a_receiver_that_takes_nothing_is_dropped_and_its_slot_is_free(sites: Sites) -> None:
    origin, here = sites("origin", stall_s=0.2), sites("here")
    version = origin.publish(layout=BIG)
    stopped = [Connection(origin.server.address, connect_s=5.0, stall_s=5.0) for _ in range(2)]
    for connection in stopped:
        connection.open(SECRET, RUN)
        connection.ask(Get(VERSION, 0, BIG.nbytes, BIG.chunk_bytes, 0, BIG.chunks(0)))
    await wait_until(lambda: origin.server.stats().stalled == 2, "both are dropped")
    transport = here.transport()
    source = await transport.open(version.sealed, 0)
    assert not isinstance(source, Unavailable)
    assert np.array_equal(await pull(source, BIG, step=4), version.data)
    await source.close()
    await transport.close()
    for connection in stopped:
        connection.close()


async def test_more_uploads_than_slots_are_told_busy_and_come_later(sites: Sites) -> None:
    origin, here = sites("origin", stall_s=0.5), sites("here")
    version = origin.publish()
    first = [Connection(origin.server.address, connect_s=5.0, stall_s=5.0) for _ in range(2)]
    third = Connection(origin.server.address, connect_s=5.0, stall_s=5.0)
    get = Get(VERSION, 0, LAYOUT.nbytes, LAYOUT.chunk_bytes, 0, 1)
    for connection in first:
        connection.open(SECRET, RUN)
        connection.ask(get)
        assert connection.header().status is Status.CHUNK
    third.open(SECRET, RUN)
    third.ask(get)
    assert third.header().status is Status.BUSY
    transport = here.transport()
    source = await transport.open(version.sealed, 0)
    assert not isinstance(source, Unavailable)
    assert np.array_equal(await pull(source), version.data)
    assert origin.server.stats().busy >= 1
    await source.close()
    await transport.close()
    for connection in (*first, third):
        connection.close()


async def test_connections_are_bounded(sites: Sites) -> None:
    origin = sites("origin", max_connections=2)
    host, port = origin.server.address.split(":")
    held = [socket.create_connection((host, int(port))) for _ in range(2)]
    await wait_until(lambda: origin.server.connections == 2, "two are served")
    with socket.create_connection((host, int(port))) as refused:
        refused.settimeout(60)
        with contextlib.suppress(ConnectionError):
            assert refused.recv(100) == b""
    await wait_until(lambda: origin.server.stats().refused == 1, "the third is counted")
    for sock in held:
        sock.close()


def test_a_connection_for_which_there_is_no_thread_is_refused(sites: Sites) -> None:
    origin = sites("origin")
    host, port = origin.server.address.split(":")
    before = threading.stack_size(1 << 47)
    try:
        with socket.create_connection((host, int(port))) as refused:
            refused.settimeout(60)
            with contextlib.suppress(ConnectionError):
                assert refused.recv(100) == b""
    finally:
        threading.stack_size(before)
    wait_here(lambda: origin.server.stats().refused == 1, "it is counted")
    connection = Connection(origin.server.address, connect_s=60.0, stall_s=60.0)
    connection.open(SECRET, RUN)
    connection.close()


async def test_what_downloads_share_is_no_secret_and_no_closed_connection(sites: Sites) -> None:
    first, second = sites("first"), sites("second")
    transport = sites("here").transport()
    shared = transport.downloads
    assert repr(SECRET) not in repr(shared)
    connections = [Connection(site.server.address, connect_s=60.0, stall_s=60.0) for site in (first, second)]
    for connection in connections:
        connection.open(SECRET, RUN)
    shared.give_back(connections[0])
    first.server.close()
    shared.give_back(connections[1])
    assert [connection.sock.fileno() >= 0 for connection in connections] == [False, True]
    assert shared.take(second.server.address) is connections[1]
    shared.give_back(connections[1])
    await transport.close()


async def test_requests_that_are_not_valid_end_the_connection(sites: Sites) -> None:
    origin = sites("origin")
    origin.publish()
    for frame in (b"\xff\xff\xff\xff", struct.pack("<I", 3) + b"abc", struct.pack("<I", 65537)):
        connection = Connection(origin.server.address, connect_s=5.0, stall_s=5.0)
        connection.open(SECRET, RUN)
        connection._sock.sendall(frame)
        with pytest.raises(ConnectionError):
            connection.header()
        connection.close()
    await wait_until(lambda: origin.server.stats().invalid == 3, "all are counted")


async def test_a_server_closes_at_once_whatever_its_connections_do(sites: Sites) -> None:
    origin = sites("origin", wait_s=60.0, stall_s=60.0)
    origin.publish(chunks=1)
    origin.publish(PolicyVersion(1, 8), BIG)
    waiting = Connection(origin.server.address, connect_s=5.0, stall_s=60.0)
    stalled = Connection(origin.server.address, connect_s=5.0, stall_s=60.0)
    idle = socket.create_connection(("127.0.0.1", int(origin.server.address.split(":")[1])))
    waiting.open(SECRET, RUN)
    waiting.ask(Get(VERSION, 0, LAYOUT.nbytes, LAYOUT.chunk_bytes, 0, 3))
    stalled.open(SECRET, RUN)
    stalled.ask(Get(PolicyVersion(1, 8), 0, BIG.nbytes, BIG.chunk_bytes, 0, BIG.chunks(0)))
    await wait_until(lambda: origin.server.uploads == 2, "both are served")
    await asyncio.wait_for(asyncio.to_thread(origin.server.close), 30)
    assert origin.server.connections == 0
    for connection in (waiting, stalled):
        connection.close()
    idle.close()


def test_addresses_are_those_of_living_weight_services() -> None:
    peers = [
        Peer("w1", "weights", "a", 1, True, {"bulk": "a:1"}),
        Peer("w2", "weights", "b", 1, False, {"bulk": "b:1"}),
        Peer("w3", "weights", "c", 1, True, {"bulk": 7}),
        Peer("p", "producer", "d", 1, True, {"bulk": "d:1"}),
        Peer("w4", "weights", "e", 1, True, {}),
    ]
    assert bulk_addresses(peers) == {"a": "a:1"}


async def test_a_transport_of_another_run_is_refused(sites: Sites) -> None:
    origin = sites("origin")
    version = origin.publish()
    transport = TcpTransport(lambda: sites.book, SECRET, "another-run", host="x", stall_s=0.1, patience_s=0.2)
    source = await transport.open(version.sealed, 0)
    assert not isinstance(source, Unavailable)
    place = Placement(LAYOUT, 0, np.zeros(LAYOUT.nbytes, np.uint8))
    answers = []
    while not answers or answers[-1] == []:
        answers.append(await source.fetch(range(1), place, Pace()))
    assert isinstance(answers[-1], Unavailable)
    await source.close()
    await transport.close()
    assert origin.server.stats().refused >= 1
    assert origin.server.stats().chunks == 0
