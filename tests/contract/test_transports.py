"""What every weight transport promises, the one in memory included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import WeightError
from headrace.version import PolicyVersion
from weightsync.arena import Arena, Bytes, SegmentName
from weightsync.digests import BLOCK_BYTES, Pace, digests_of
from weightsync.manifest import Layout, Manifest
from weightsync.transports.api import Transport, Unavailable
from weightsync.transports.memory import MemoryTransport
from weightsync.transports.shm import ShmTransport

LAYOUT = Layout.of([("a", "float32", (BLOCK_BYTES // 4 + 100,)), ("b", "bfloat16", (33,))])
CONTENT = np.random.default_rng(5).integers(0, 256, LAYOUT.nbytes, dtype=np.uint8)


@dataclass
class Place:
    """A transport, and how bytes come to where it looks, and go."""

    transport: Transport
    put: Callable[[Bytes], str]
    free: Callable[[str], object]


@pytest.fixture(params=["shm", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "memory":
        store: dict[str, Bytes] = {}

        def keep(data: Bytes) -> str:
            store["segment"] = data.copy()
            return "segment"

        return Place(MemoryTransport(store), keep, store.pop)
    arena = Arena(tmp_path)

    def create(data: Bytes) -> str:
        segment = arena.create("run", PolicyVersion(1, 1), data.nbytes)
        segment.data[:] = data.data
        segment.seal()
        return segment.name

    def unlink(text: str) -> None:
        name = SegmentName.parse(text)
        assert name is not None
        assert arena.remove(name)

    return Place(ShmTransport("here", arena), create, unlink)


def manifest(segment: str, host: str = "here") -> Manifest:
    return Manifest(PolicyVersion(1, 1), LAYOUT, digests_of(LAYOUT, CONTENT), host, segment, True, "run", 0.0)


async def test_fetched_ranges_are_there_and_nothing_else_is_touched(place: Place) -> None:
    source = await place.transport.open(manifest(place.put(CONTENT)))
    assert not isinstance(source, Unavailable)
    out = np.zeros_like(CONTENT)
    ranges = [(3, 70), (100, 100), (BLOCK_BYTES - 5, BLOCK_BYTES + 9), (LAYOUT.nbytes - 1, LAYOUT.nbytes)]
    assert await source.fetch(ranges, out, Pace()) is None
    expected = np.zeros_like(CONTENT)
    for start, end in ranges:
        expected[start:end] = CONTENT[start:end]
    assert np.array_equal(out, expected)
    await source.close()


async def test_whole_version_has_the_manifests_digests(place: Place) -> None:
    source = await place.transport.open(manifest(place.put(CONTENT)))
    assert not isinstance(source, Unavailable)
    out = np.zeros_like(CONTENT)
    assert await source.fetch([(0, LAYOUT.nbytes)], out, Pace(0.9)) is None
    assert digests_of(LAYOUT, out) == digests_of(LAYOUT, CONTENT)
    await source.close()
    await source.close()


async def test_opened_version_outlives_its_freeing(place: Place) -> None:
    segment = place.put(CONTENT)
    source = await place.transport.open(manifest(segment))
    assert not isinstance(source, Unavailable)
    place.free(segment)
    out = np.zeros_like(CONTENT)
    assert await source.fetch([(0, LAYOUT.nbytes)], out, Pace()) is None
    assert np.array_equal(out, CONTENT)
    await source.close()


async def test_freed_version_is_unavailable_with_a_reason(place: Place) -> None:
    segment = place.put(CONTENT)
    place.free(segment)
    source = await place.transport.open(manifest(segment))
    assert isinstance(source, Unavailable)
    assert "gone" in source.reason


async def test_version_of_another_size_is_unavailable_with_a_reason(place: Place) -> None:
    source = await place.transport.open(manifest(place.put(CONTENT[:-64])))
    assert isinstance(source, Unavailable)
    assert f"has {LAYOUT.nbytes - 64} bytes" in source.reason


async def test_shm_refuses_a_version_of_another_host(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="lies on host 'there', this is 'here'"):
        await ShmTransport("here", Arena(tmp_path)).open(manifest("segment", host="there"))
