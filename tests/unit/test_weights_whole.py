"""A version read whole out of a host's memory, or the reason why it cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.version import PolicyVersion
from tests.weights import LAYOUT, flat, flip, tensors
from weightsync.arena import Arena
from weightsync.digests import digest_of
from weightsync.manifest import Layout, Manifest, Part
from weightsync.placement import Placement
from weightsync.transports.api import Unavailable
from weightsync.whole import ROUND_CHUNKS, read_whole

VERSION = PolicyVersion(1, 7)
CONTENT = flat(tensors(7))


def publish(arena: Arena, host: str, parts: int = 1) -> Manifest:
    """As ranks of a trainer do on `host`."""
    layout = replace(LAYOUT, parts=parts)
    made = []
    for part in range(parts):
        segment = arena.create("r", VERSION, layout, part)
        place = Placement(layout, part, np.frombuffer(CONTENT, np.uint8))
        digests, at, data = [], 0, segment.data
        for chunk in range(len(place.bounds)):
            views = place.views(chunk)
            digests.append(digest_of(views))
            for view in views:
                data[at : at + len(view)] = view
                at += len(view)
        data.release()
        segment.grow(digests)
        segment.seal()
        made.append(Part(host, segment.name, tuple(digests)))
    return Manifest(VERSION, layout, tuple(made), True, "r", 1.0)


@pytest.mark.parametrize("parts", [1, 3])
async def test_every_byte_comes_whatever_host_published_it(tmp_path: Path, parts: int) -> None:
    assert LAYOUT.chunks(0) < ROUND_CHUNKS
    got = await read_whole(publish(Arena(tmp_path), "another-host", parts), Arena(tmp_path))
    assert not isinstance(got, Unavailable)
    assert got.tobytes() == CONTENT


async def test_more_chunks_than_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.whole.ROUND_CHUNKS", 3)
    got = await read_whole(publish(Arena(tmp_path), "here"), Arena(tmp_path))
    assert not isinstance(got, Unavailable)
    assert got.tobytes() == CONTENT


async def test_one_flipped_bit_is_damage_and_names_its_tensor(tmp_path: Path) -> None:
    manifest = publish(Arena(tmp_path), "here")
    norm = LAYOUT.tensors[1]
    flip(tmp_path / manifest.parts[0].segment, norm.offset + 4)
    got = await read_whole(manifest, Arena(tmp_path))
    assert isinstance(got, Unavailable)
    assert got.reason.startswith("version 1.7 is damaged in the memory of this host: the digest of chunk 8 (norm")


async def test_what_is_gone_or_of_another_size_is_said(tmp_path: Path) -> None:
    arena = Arena(tmp_path)
    manifest = publish(arena, "here")
    other = Layout.of([("embed", "bfloat16", (3, 8))], chunk_bytes=64)
    got = await read_whole(replace(manifest, layout=other), arena)
    assert isinstance(got, Unavailable)
    (name,) = arena.segments()
    arena.remove(name)
    got = await read_whole(manifest, arena)
    assert isinstance(got, Unavailable)
    assert "version 1.7 is not in the memory of this host" in got.reason
    assert got.reason.endswith(f"segment {name} is gone")
    got = await read_whole(replace(manifest, sealed=False), arena)
    assert got == Unavailable("version 1.7 is not sealed")


async def test_a_copy_that_never_gets_whole_is_not_waited_for(tmp_path: Path) -> None:
    """As a weight service leaves it that dies while it brings a version."""
    arena = Arena(tmp_path)
    manifest = publish(arena, "another-host")
    (name,) = arena.segments()
    arena.remove(name)
    begun = arena.create("r", VERSION, LAYOUT)
    begun.data[:] = CONTENT
    begun.grow(manifest.parts[0].digests[:2])
    got = await read_whole(manifest, arena)
    assert got == Unavailable("version 1.7 has not wholly come to this host yet")
