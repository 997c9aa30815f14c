"""`headrace weights` on a broker in memory: what is listed, and what may be kept."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from broker.api import Fence, Peer, RunRecord
from broker.memory.runs import MemoryRun
from broker.memory.store import RunStore
from deploy.weights import listed, pin, table, unpin, version_of
from headrace.errors import ConfigError, WeightError
from headrace.hosts import host_name
from headrace.version import PolicyVersion
from tests.weights import LAYOUT
from weightsync.arena import Arena
from weightsync.manifest import Manifest, Part, encode

DIGESTS = tuple(bytes([chunk]) * 16 for chunk in range(LAYOUT.chunks(0)))


class Scene:
    """A run whose trainer publishes versions, in this host's memory or another's."""

    def __init__(self, record: RunRecord, folder: Path) -> None:
        self.run_id = record.run_id
        self.port = MemoryRun(record.run_id, RunStore(record), 3)
        self.arena = Arena(folder)
        self.fence = Fence(0, "")

    async def publish(self, step: int, *, host: str = "", sealed: bool = True) -> PolicyVersion:
        if not self.fence.incarnation:
            self.fence = await self.port.take_fence(0)
        version = PolicyVersion(1, step)
        name = "elsewhere" if host else self.arena.create(self.run_id, version, LAYOUT).name
        part = Part(host or host_name(), name, DIGESTS if sealed else ())
        manifest = Manifest(version, LAYOUT, (part,), sealed, self.run_id, time.time() - 90 if sealed else 0.0)
        if sealed:
            await self.port.publish_head(self.fence, version, encode(manifest))
        else:
            await self.port.announce(self.fence, version, encode(manifest))
        return version

    def free(self, version: PolicyVersion) -> None:
        for name in self.arena.segments(self.run_id):
            if name.version == version:
                self.arena.remove(name)

    async def plays(self, name: str, version: PolicyVersion) -> None:
        await self.port.heartbeat(Peer(name, "producer", "h", 1, True, {"version": str(version)}), 60)


@pytest.fixture
def scene(record: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setenv("HEADRACE_SHM_DIR", str(tmp_path))
    return Scene(record, tmp_path)


async def test_versions_are_listed_with_whoever_needs_them(scene: Scene) -> None:
    assert await listed(scene.run_id, scene.port) == []
    freed, kept, head = [await scene.publish(step) for step in (1, 2, 3)]
    await scene.publish(4, sealed=False)
    await scene.port.pin(kept)
    await scene.port.lease(head, "producer-2", 60)
    for name, version in (("producer-2", kept), ("producer-1", kept), ("producer-3", head)):
        await scene.plays(name, version)
    scene.free(freed)
    rows = await listed(scene.run_id, scene.port)
    assert [(row["version"], row["state"], row["head"], row["pinned"], row["here"]) for row in rows] == [
        ("1.4", "coming", False, False, True),
        ("1.3", "sealed", True, False, True),
        ("1.2", "sealed", False, True, True),
        ("1.1", "gone", False, False, False),
    ]
    assert [row["readers"] for row in rows] == [[], ["producer-2"], [], []]
    assert [row["producers"] for row in rows] == [[], ["producer-3"], ["producer-1", "producer-2"], []]
    assert all(row["bytes"] == LAYOUT.nbytes and row["hosts"] == [host_name()] for row in rows)
    assert rows[0]["age_s"] is None
    assert 90 <= rows[1]["age_s"] < 900
    out = io.StringIO()
    Console(file=out, width=160, highlight=False).print(table(rows))
    shown = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert shown[0] == "version MB host state head pinned readers producers age"
    assert shown[1] == f"1.4 0.0 {host_name()} coming"
    assert shown[3] == f"1.2 0.0 {host_name()} sealed pinned producer-1, producer-2 1 min"


async def test_what_lies_elsewhere_is_believed_and_what_is_no_manifest_said(scene: Scene) -> None:
    await scene.publish(1, host="another-host")
    await scene.port.announce(scene.fence, PolicyVersion(1, 2), b"?")
    await scene.port.pin(PolicyVersion(9, 9))
    rows = await listed(scene.run_id, scene.port)
    assert [(row["version"], row["state"], row["here"]) for row in rows] == [
        ("9.9", "gone", False),
        ("1.2", "unreadable", False),
        ("1.1", "sealed", False),
    ]
    Console(file=io.StringIO()).print(table(rows))


async def test_only_what_is_there_is_kept_and_only_what_is_kept_let_go(scene: Scene) -> None:
    version = await scene.publish(1)
    gone = await scene.publish(2)
    scene.free(gone)
    for wrong in (gone, PolicyVersion(1, 3)):
        with pytest.raises(WeightError, match=rf"has no weight version {wrong} \(any more\)"):
            await pin(scene.run_id, scene.port, wrong)
    assert await scene.port.pinned() == set()
    assert f"keeps weight version {version}" in await pin(scene.run_id, scene.port, version)
    assert await scene.port.pinned() == {version}
    assert f"frees weight version {version}" in await unpin(scene.run_id, scene.port, version)
    with pytest.raises(WeightError, match=f"weight version {version} of run {scene.run_id} is not pinned"):
        await unpin(scene.run_id, scene.port, version)


async def test_one_that_is_freed_while_it_is_pinned_is_not_kept(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    version = await scene.publish(1)
    keep = scene.port.pin

    async def late(pinned: PolicyVersion) -> None:
        scene.free(pinned)
        await keep(pinned)

    monkeypatch.setattr(scene.port, "pin", late)
    with pytest.raises(WeightError, match="has no weight version"):
        await pin(scene.run_id, scene.port, version)
    assert await scene.port.pinned() == set()


async def test_a_host_without_memory_for_versions_lists_them_too(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.publish(1, host="another-host")
    monkeypatch.setenv("HEADRACE_SHM_DIR", str(tmp_path / "not-there"))
    (row,) = await listed(scene.run_id, scene.port)
    assert (row["state"], row["here"]) == ("sealed", False)


def test_the_name_of_a_version() -> None:
    assert version_of("2.140") == PolicyVersion(2, 140)
    for text in ("", "2", "2.", "2.x", "-1.2", "1.2.3", " 1.2", "1" * 19 + ".1"):
        with pytest.raises(ConfigError, match="is no weight version"):
            version_of(text)
