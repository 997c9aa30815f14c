"""What every weight transport promises, the one in memory included."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import WeightError
from headrace.version import PolicyVersion
from weightsync.arena import Arena, SegmentName
from weightsync.digests import Pace, digest_of
from weightsync.manifest import Layout, Manifest, Part
from weightsync.placement import Bytes, Placement, chunk_bounds
from weightsync.transports import shm
from weightsync.transports.api import Source, Transport, Unavailable
from weightsync.transports.memory import MemoryTransport
from weightsync.transports.shm import ShmTransport

VERSION = PolicyVersion(1, 1)
SHAPES = [("a", "float32", (301, 100)), ("b", "bfloat16", (33,)), ("c", "float32", ())]
WHOLE, HALVES = (Layout.of(SHAPES, parts, chunk_bytes=1 << 14) for parts in (1, 2))


def content_of(layout: Layout, part: int) -> Bytes:
    """Zeros between tensors, as in every segment."""
    content = np.random.default_rng(5).integers(1, 256, layout.part_nbytes(part), dtype=np.uint8)
    used = np.zeros(layout.nbytes, np.uint8)
    for tensor in layout.tensors:
        used[tensor.offset : tensor.end] = 1
    at = 0
    for chunk in range(layout.chunks(part)):
        for view in Placement(layout, part, used).views(chunk):
            content[at : at + len(view)] *= np.frombuffer(view, np.uint8)
            at += len(view)
    return content


def manifest(segment: str, layout: Layout = WHOLE, *, sealed: bool = True, host: str = "here") -> Manifest:
    """Whose parts all lie in this segment."""
    parts = []
    for part in range(layout.parts):
        content, bounds = content_of(layout, part).data, chunk_bounds(layout, part)
        digests = tuple(digest_of([content[start:end]]) for start, end in bounds) if sealed else ()
        parts.append(Part(host, segment, digests))
    return Manifest(VERSION, layout, tuple(parts), sealed, "run", 0.0)


@dataclass
class Place:
    """A transport, and how the bytes of a part come to where it looks, and go."""

    transport: Transport
    put: Callable[[Bytes, Layout, int], str]
    free: Callable[[str], object]

    async def opened(self, layout: Layout = WHOLE, part: int = 0) -> Source:
        segment = self.put(content_of(layout, part), layout, part)
        source = await self.transport.open(manifest(segment, layout), part)
        assert not isinstance(source, Unavailable)
        return source


@pytest.fixture(params=["shm", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "memory":
        store: dict[str, Bytes] = {}

        def keep(content: Bytes, layout: Layout, part: int) -> str:
            store["segment"] = content.copy()
            return "segment"

        return Place(MemoryTransport(store), keep, store.pop)
    arena = Arena(tmp_path)

    def create(content: Bytes, layout: Layout, part: int) -> str:
        segment = arena.create("run", VERSION, layout, part)
        segment.data[:] = content.data
        segment.grow([b"0" * 16] * layout.chunks(part))
        segment.seal()
        return segment.name

    def unlink(text: str) -> None:
        name = SegmentName.parse(text)
        assert name is not None
        assert arena.remove(name)

    return Place(ShmTransport("here", arena), create, unlink)


@pytest.mark.parametrize(("layout", "part"), [(WHOLE, 0), (HALVES, 0), (HALVES, 1)], ids=["whole", "first", "second"])
async def test_fetched_chunks_are_in_their_places_and_nothing_else_is_touched(
    place: Place, layout: Layout, part: int
) -> None:
    source = await place.opened(layout, part)
    digests = manifest("", layout).parts[part].digests
    out, expected = np.full((2, layout.nbytes), 7, np.uint8)
    came, placement = Placement(layout, part, out), Placement(layout, part, expected)
    content = content_of(layout, part)
    for chunks in (range(1, 3), range(len(digests) - 1, len(digests)), range(1)):
        assert await source.fetch(chunks, came, Pace(0.9)) == [*digests[chunks.start : chunks.stop]]
        for chunk in chunks:
            at = placement.bounds[chunk][0]
            for view in placement.views(chunk):
                view[:] = content[at : at + len(view)].data
                at += len(view)
        assert np.array_equal(out, expected)
    await source.close()
    await source.close()


async def test_parts_together_are_the_version(place: Place) -> None:
    out = np.zeros(HALVES.nbytes, np.uint8)
    for part, theirs in enumerate(manifest("", HALVES).parts):
        source = await place.opened(HALVES, part)
        chunks, placement = range(len(theirs.digests)), Placement(HALVES, part, out)
        assert await source.fetch(chunks, placement, Pace()) == [*theirs.digests]
        await source.close()
        assert [digest_of(placement.views(chunk)) for chunk in chunks] == [*theirs.digests]
    assert all(out[tensor.offset : tensor.end].all() for tensor in HALVES.tensors)


async def test_opened_version_outlives_its_freeing(place: Place) -> None:
    content, digests = content_of(WHOLE, 0), manifest("").parts[0].digests
    segment = place.put(content, WHOLE, 0)
    source = await place.transport.open(manifest(segment), 0)
    assert not isinstance(source, Unavailable)
    place.free(segment)
    out = np.zeros(WHOLE.nbytes, np.uint8)
    assert await source.fetch(range(len(digests)), Placement(WHOLE, 0, out), Pace()) == [*digests]
    assert np.array_equal(out, content)
    await source.close()


async def test_freed_version_is_unavailable_with_a_reason(place: Place) -> None:
    segment = place.put(content_of(WHOLE, 0), WHOLE, 0)
    place.free(segment)
    source = await place.transport.open(manifest(segment), 0)
    assert isinstance(source, Unavailable)
    assert "gone" in source.reason


async def test_version_of_another_size_is_unavailable_with_a_reason(place: Place) -> None:
    smaller = Layout.of([("a", "float32", (30, 100))])
    source = await place.transport.open(manifest(place.put(content_of(smaller, 0), smaller, 0)), 0)
    assert isinstance(source, Unavailable)
    assert " has " in source.reason


async def test_shm_refuses_a_version_of_another_host(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="lies on host 'there', this is 'here'"):
        await ShmTransport("here", Arena(tmp_path)).open(manifest("segment", host="there"), 0)


async def test_shm_brings_what_its_trainer_has_made_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena, digests = Arena(tmp_path), [*manifest("").parts[0].digests]
    segment = arena.create("run", VERSION, WHOLE)
    source = await ShmTransport("here", arena).open(manifest(segment.name, sealed=False), 0)
    assert not isinstance(source, Unavailable)
    out = np.zeros(WHOLE.nbytes, np.uint8)
    placement, chunks = Placement(WHOLE, 0, out), range(len(digests))
    monkeypatch.setattr(shm, "WAIT_S", 0.02)
    assert await source.fetch(chunks, placement, Pace()) == []
    segment.data[:] = content_of(WHOLE, 0).data
    segment.grow(digests[:2])
    assert await source.fetch(chunks, placement, Pace()) == digests[:2]
    assert await source.fetch(chunks[2:], placement, Pace()) == []
    monkeypatch.setattr(shm, "WAIT_S", 60.0)
    waiting = asyncio.create_task(source.fetch(chunks[2:], placement, Pace()))
    segment.grow(digests[2:])
    assert await waiting == digests[2:]
    assert np.array_equal(out, content_of(WHOLE, 0))
    await source.close()


async def test_shm_waits_for_no_segment_that_was_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena, digests = Arena(tmp_path), [*manifest("").parts[0].digests]
    segment = arena.create("run", VERSION, WHOLE)
    source = await ShmTransport("here", arena).open(manifest(segment.name, sealed=False), 0)
    assert not isinstance(source, Unavailable)
    segment.data[:] = content_of(WHOLE, 0).data
    segment.grow(digests[:1])
    segment.discard()
    placement = Placement(WHOLE, 0, np.zeros(WHOLE.nbytes, np.uint8))
    monkeypatch.setattr(shm, "WAIT_S", 0.02)
    assert await source.fetch(range(len(digests)), placement, Pace()) == digests[:1]
    gone = await source.fetch(range(1, len(digests)), placement, Pace())
    assert isinstance(gone, Unavailable)
    assert "given up" in gone.reason
    await source.close()
