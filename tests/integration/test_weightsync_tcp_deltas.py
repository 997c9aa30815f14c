"""Deltas between hosts: what they make is the full version bit by bit, whatever they meet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.version import PolicyVersion
from tests.bulk import LAYOUT, RUN, SECRET, Publication, Site, Sites, Wire, changed, content, digests, pull
from tests.support import wait_until
from weightsync.bulk.client import Connection
from weightsync.bulk.frames import Change, Codec, Get
from weightsync.bulk.shelf import HeldBase, Shelf
from weightsync.digests import Pace
from weightsync.manifest import Layout, Manifest, Part
from weightsync.placement import Bytes, Placement
from weightsync.transports.api import Base, Unavailable
from weightsync.transports.tcp import TcpTransport

OLD, NEW = PolicyVersion(1, 7), PolicyVersion(1, 8)
WIDE = Layout.of([("w", "bfloat16", (1 << 16, 16)), ("n", "float32", (999,))], chunk_bytes=1 << 18)


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Sites]:
    made = Sites(tmp_path)
    yield made
    made.close()


class Front:
    """A base in a buffer of the layout, as an engine has it."""

    def __init__(self, version: PolicyVersion, layout: Layout, data: Bytes) -> None:
        self.version = version
        self._layout = layout
        self._data = data

    def read(self, part: int, chunk: int, views: list[memoryview]) -> None:
        source = b"".join(Placement(self._layout, part, self._data).views(chunk))
        at = 0
        for view in views:
            view[:] = source[at : at + len(view)]
            at += len(view)


async def fetched(transport: TcpTransport, manifest: Manifest, layout: Layout, base: Base | None) -> Bytes:
    source = await transport.open(manifest, 0, base)
    assert not isinstance(source, Unavailable)
    out = await pull(source, layout)
    await source.close()
    return out


def both(origin: Site, layout: Layout) -> tuple[Publication, Publication]:
    """An older version, and one that differs in 2 % of its elements."""
    old = origin.publish(OLD, layout, seed=3)
    return old, origin.publish(NEW, layout, data=changed(old.data, 0.02, 4))


@pytest.mark.parametrize("codec", ["auto", "sparse-ulp", "sparse-abs"])
@pytest.mark.parametrize("layout", [LAYOUT, WIDE], ids=["mixed", "wide"])
async def test_a_delta_makes_the_full_version_bit_by_bit(sites: Sites, codec: str, layout: Layout) -> None:
    origin, here = sites("origin"), sites("here")
    old, new = both(origin, layout)
    transport = here.transport(codec=codec)
    out = await fetched(transport, new.sealed, layout, Front(OLD, layout, old.data))
    assert np.array_equal(out, new.data)
    stats = transport.stats()
    assert stats.delta_chunks > 0
    assert stats.delta_bytes + stats.full_bytes < layout.nbytes / 2
    assert origin.server.stats().sent_bytes == stats.delta_bytes + stats.full_bytes
    await transport.close()


async def test_a_dense_change_comes_in_full(sites: Sites) -> None:
    origin, here = sites("origin"), sites("here")
    old = origin.publish(OLD, WIDE, seed=3)
    new = origin.publish(NEW, WIDE, seed=4)
    transport = here.transport()
    assert np.array_equal(await fetched(transport, new.sealed, WIDE, Front(OLD, WIDE, old.data)), new.data)
    assert transport.stats().delta_chunks == 0
    await transport.close()


async def test_without_the_base_at_the_sender_the_version_comes_in_full(sites: Sites) -> None:
    origin, here = sites("origin"), sites("here")
    old, new = both(origin, WIDE)
    old.segment.discard()
    transport = here.transport()
    assert np.array_equal(await fetched(transport, new.sealed, WIDE, Front(OLD, WIDE, old.data)), new.data)
    assert transport.stats().full_bytes == WIDE.nbytes
    await transport.close()


async def test_runs_that_are_none_leave_no_base_open(sites: Sites) -> None:
    origin = sites("origin")
    old, _ = both(origin, LAYOUT)
    connection = Connection(origin.server.address, connect_s=60.0, stall_s=60.0)
    connection.open(SECRET, RUN)
    before = opened(origin, old)
    change = Change(OLD, Codec.SPARSE_ULP, b"none")
    connection.ask(Get(NEW, 0, LAYOUT.nbytes, LAYOUT.chunk_bytes, 0, 1, change))
    await wait_until(lambda: origin.server.connections == 0, "it ends the connection")
    assert origin.server.stats().invalid == 1
    assert opened(origin, old) == before
    connection.close()


def opened(site: Site, version: Publication) -> int:
    """How often this process has the segment open."""
    file = str(site.arena.folder / version.segment.name)
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            count += str(descriptor.readlink()) == file
    return count


@pytest.mark.parametrize("sealed", [True, False])
async def test_with_another_base_here_the_version_comes_in_full(sites: Sites, sealed: bool) -> None:
    origin, here = sites("origin"), sites("here")
    old, new = both(origin, WIDE)
    wrong = Front(OLD, WIDE, changed(old.data, 0.01, 77))
    transport = here.transport()
    out = await fetched(transport, new.sealed if sealed else new.manifest, WIDE, wrong)
    assert np.array_equal(out, new.data)
    stats = transport.stats()
    assert stats.full_bytes >= WIDE.nbytes - WIDE.chunk_bytes
    assert (stats.bad_chunks, stats.failures) == (0, 0), "no peer is to blame"
    await transport.close()


async def test_on_one_host_or_where_it_is_not_wanted_there_is_no_delta(sites: Sites) -> None:
    origin, here = sites("origin"), sites("here")
    old, new = both(origin, WIDE)
    same = TcpTransport(lambda: here.book, SECRET, RUN, host="origin")
    for transport in (here.transport(codec="raw"), same):
        assert np.array_equal(await fetched(transport, new.sealed, WIDE, Front(OLD, WIDE, old.data)), new.data)
        assert transport.stats().delta_chunks == 0
        await transport.close()


async def test_a_second_reader_costs_no_encoding(sites: Sites) -> None:
    origin = sites("origin")
    old, new = both(origin, WIDE)
    made = []
    for name in ("one", "two"):
        transport = sites(name).transport(relay=False)
        assert np.array_equal(await fetched(transport, new.sealed, WIDE, Front(OLD, WIDE, old.data)), new.data)
        await transport.close()
        made.append(origin.server.stats().encoded)
    assert made[0] == made[1] == WIDE.chunks(0)


@pytest.mark.parametrize("came_as", ["sparse-ulp", "raw"])
async def test_a_relay_sends_deltas_that_came_and_makes_those_that_did_not(sites: Sites, came_as: str) -> None:
    origin, relay, here = sites("origin"), sites("relay"), sites("here")
    old, new = both(origin, WIDE)
    relay.publish(OLD, WIDE, seed=3)
    relay.publish(NEW, WIDE, data=new.data)
    pulling = relay.transport(codec=came_as)
    await fetched(pulling, new.sealed, WIDE, Front(OLD, WIDE, old.data))
    sent = origin.server.stats().sent_bytes
    transport = here.transport()
    assert np.array_equal(await fetched(transport, new.sealed, WIDE, Front(OLD, WIDE, old.data)), new.data)
    assert origin.server.stats().sent_bytes == sent
    stats = relay.server.stats()
    assert stats.delta_chunks > 0
    assert stats.encoded == (0 if came_as == "sparse-ulp" else WIDE.chunks(0))
    await transport.close()
    await pulling.close()


async def test_a_delta_of_a_version_that_is_being_published_streams(sites: Sites) -> None:
    origin, here = sites("origin", wait_s=0.3), sites("here")
    old = origin.publish(OLD, WIDE, seed=3)
    new = origin.publish(NEW, WIDE, data=changed(old.data, 0.02, 4), chunks=2)
    transport = here.transport()
    source = await transport.open(new.manifest, 0, Front(OLD, WIDE, old.data))
    assert not isinstance(source, Unavailable)
    out = np.zeros(WIDE.nbytes, np.uint8)
    place = Placement(WIDE, 0, out)
    assert len(await source.fetch(range(5), place, Pace())) == 2  # type: ignore[arg-type]
    fetching = asyncio.create_task(source.fetch(range(2, 5), place, Pace()))
    new.grow(3)
    got = await fetching
    assert got == digests(WIDE, new.data)[2 : 2 + len(got)]  # type: ignore[arg-type]
    assert transport.stats().delta_chunks >= 3
    await source.close()
    await transport.close()


async def test_rows_of_a_rank_come_as_a_delta_into_their_places(sites: Sites) -> None:
    layout = replace(LAYOUT, parts=2)
    origin, here = sites("origin"), sites("here")
    parts, old_flat, new_flat = [], np.zeros(layout.nbytes, np.uint8), np.zeros(layout.nbytes, np.uint8)
    for number in range(2):
        old = content(layout, 5, number)
        new = changed(old, 0.05, 6)
        for version, data, flat in ((OLD, old, old_flat), (NEW, new, new_flat)):
            segment = origin.arena.create(RUN, version, layout, number)
            segment.data[:] = data.data
            segment.grow(digests(layout, data))
            segment.seal()
            place = Placement(layout, number, flat)
            for chunk, (first, _) in enumerate(place.bounds):
                at = first
                for view in place.views(chunk):
                    view[:] = data[at : at + len(view)].data
                    at += len(view)
        parts.append(Part("origin", segment.name, tuple(digests(layout, new))))
    manifest = Manifest(NEW, layout, tuple(parts), True, RUN)
    transport = here.transport(codec="sparse-ulp")
    out = np.zeros(layout.nbytes, np.uint8)
    for number in range(2):
        source = await transport.open(manifest, number, Padded(origin, layout, number))
        assert not isinstance(source, Unavailable)
        place = Placement(layout, number, out)
        got = await source.fetch(range(len(place.bounds)), place, Pace())
        assert got == list(parts[number].digests)
        await source.close()
    assert np.array_equal(out, new_flat)
    assert transport.stats().delta_chunks > 0
    await transport.close()


class Padded:
    """The base as this host's memory has it, with what lies between tensors."""

    version = OLD

    def __init__(self, site: Site, layout: Layout, part: int) -> None:
        held = Shelf(site.arena, RUN).whole(OLD, part, layout.part_nbytes(part), layout.chunk_bytes)
        assert held is not None
        self._base = HeldBase(OLD, held, layout.chunk_bytes)

    def read(self, part: int, chunk: int, views: list[memoryview]) -> None:
        self._base.read(part, chunk, views)


async def test_any_changed_byte_of_a_delta_is_noticed(sites: Sites) -> None:
    origin, here = sites("origin"), sites("here")
    old, new = both(origin, LAYOUT)
    where = origin.server.address
    for at in range(200, 700, 7):
        wire = Wire(where, flip=at)
        origin.server.address = here.book["origin"] = wire.address
        transport = here.transport(relay=False, codec="sparse-ulp", stall_s=0.2)
        out = await fetched(transport, new.sealed, LAYOUT, Front(OLD, LAYOUT, old.data))
        assert np.array_equal(out, new.data)
        assert wire.hits == 1
        await transport.close()
        wire.close()
    origin.server.address = where
