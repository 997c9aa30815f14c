"""Versions of another host come into this host's memory: whole, verified, and at about one copy from their origin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from broker.api import Fence, RunRecord
from broker.connect import Run, connect_run, connect_runs
from headrace.version import PolicyVersion
from tests.bulk import LAYOUT, RUN, VERSION, Publication, Site, Sites, changed, content, digests
from tests.conftest import BROKER
from tests.support import wait_until
from weightsync.arena import Arena, SegmentName
from weightsync.bulk.shelf import Shelf
from weightsync.manifest import Layout, encode
from weightsync.mirror import Mirror, Outcome
from weightsync.placement import Bytes
from weightsync.transports.api import Unavailable


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Sites]:
    made = Sites(tmp_path)
    yield made
    made.close()


@dataclass
class World:
    """A broker, a trainer's fence, an origin, and mirrors."""

    port: Run
    fence: Fence
    origin: Site
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    mirrors: list[Mirror] = field(default_factory=list)

    def mirror(self, site: Site) -> Mirror:
        transport = site.transport(stall_s=0.5, codec="sparse-ulp")
        mirror = Mirror(site.arena, transport, self.port, RUN, site.name, stopping=self.stopping, block_ms=50)
        self.mirrors.append(mirror)
        return mirror

    async def seal(self, version: Publication) -> None:
        await self.port.publish_head(self.fence, version.manifest.version, encode(version.sealed))


@pytest.fixture
async def world(sites: Sites, record: RunRecord) -> AsyncIterator[World]:
    runs = connect_runs(f"memory:{record.run_id}", BROKER)
    await runs.create(replace(record, run_id=RUN))
    port = connect_run(f"memory:{record.run_id}", RUN, BROKER)
    made = World(port, await port.take_fence(0), sites("origin"))
    yield made
    for mirror in made.mirrors:
        await mirror._transport.close()
        await mirror.close()
    await port.close()
    await runs.close()


def open_files() -> int:
    """Of this process."""
    return len([*Path("/proc/self/fd").iterdir()])


def there(arena: Arena, version: PolicyVersion = VERSION, layout: Layout = LAYOUT) -> Bytes | None:
    """What a host holds of a version, once that is whole."""
    held = Shelf(arena, RUN).whole(version, 0, layout.nbytes, layout.chunk_bytes)
    if held is None:
        return None
    out = np.zeros(layout.nbytes, np.uint8)
    held.segment.read(0, [out.data])
    assert held.segment.digests(0, layout.chunks(0)) == digests(layout, out)
    held.close()
    return out


async def test_a_sealed_version_comes_into_this_hosts_memory(world: World, sites: Sites) -> None:
    here = sites("here")
    version = world.origin.publish()
    mirror = world.mirror(here)
    await world.seal(version)
    assert mirror.wants(version.sealed) == [0]
    outcome = await mirror.pull(version.sealed)
    assert (outcome.kind, outcome.nbytes, outcome.full_bytes) == ("held", LAYOUT.nbytes, LAYOUT.nbytes)
    assert np.array_equal(there(here.arena), version.data)
    assert mirror.wants(version.sealed) == []
    assert mirror.needed() == {VERSION}
    again = await mirror.pull(version.sealed)
    assert (again.kind, again.full_bytes) == ("held", 0)
    assert len(here.arena.segments(RUN)) == 1


async def test_the_next_version_comes_as_a_delta_of_the_one_that_is_here(world: World, sites: Sites) -> None:
    hosts = [sites("one"), sites("two")]
    mirrors = [world.mirror(host) for host in hosts]
    version, data = PolicyVersion(1, 0), content(LAYOUT)
    for step in range(1, 4):
        version, data = PolicyVersion(1, step), changed(data, 0.02, step)
        published = world.origin.publish(version, data=data)
        await world.seal(published)
        outcomes = await asyncio.gather(*(mirror.pull(published.sealed) for mirror in mirrors))
        assert [outcome.kind for outcome in outcomes] == ["held", "held"]
        for host, mirror, outcome in zip(hosts, mirrors, outcomes, strict=True):
            assert np.array_equal(there(host.arena, version), data)
            assert (outcome.delta_bytes > 0) == (step > 1)
            assert mirror.needed() == {version}
            if step > 1:
                assert outcome.delta_bytes + outcome.full_bytes < LAYOUT.nbytes / 2


async def test_a_mirror_that_begins_anew_finds_the_base_of_the_next_delta(world: World, sites: Sites) -> None:
    here, first = sites("here"), world.origin.publish(PolicyVersion(1, 0))
    await world.seal(first)
    assert (await world.mirror(here).pull(first.sealed)).kind == "held"
    again, data = world.mirror(here), changed(first.data, 0.02, 1)
    assert again.wants(first.sealed) == []
    again.holds(first.sealed)
    assert again.base == PolicyVersion(1, 0)
    second = world.origin.publish(PolicyVersion(1, 1), data=data)
    await world.seal(second)
    assert (await again.pull(second.sealed)).delta_bytes > 0
    assert np.array_equal(there(here.arena, PolicyVersion(1, 1)), data)


async def test_pulls_that_fail_leave_no_file_open(world: World, sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    here, first = sites("here"), world.origin.publish(PolicyVersion(1, 0))
    mirror = world.mirror(here)
    await world.seal(first)
    await mirror.pull(first.sealed)
    second = world.origin.publish(PolicyVersion(1, 1))

    async def nobody(*_: object) -> Unavailable:
        return Unavailable("nobody has said where")

    monkeypatch.setattr(mirror._transport, "open", nobody)
    before = open_files()
    for _ in range(3):
        assert (await mirror.pull(second.sealed)).kind == "vanished"
    assert open_files() == before
    assert [name.version for name in here.arena.segments(RUN)] == [PolicyVersion(1, 0)], "no memory was taken for it"


async def test_memory_for_the_next_version_is_ready_and_let_go_at_the_end(world: World, sites: Sites) -> None:
    here = sites("here")

    def spares() -> list[str]:
        return [name.nonce for name in here.arena.segments() if name.spare]

    mirror = world.mirror(here)
    for step in range(2):
        version = world.origin.publish(PolicyVersion(1, step))
        await world.seal(version)
        ready_before = spares()
        assert (await mirror.pull(version.sealed)).kind == "held"
        assert np.array_equal(there(here.arena, PolicyVersion(1, step)), version.data)
        assert len(spares()) == 1
        assert not {*ready_before} & {*spares()}
    await mirror.close()
    assert spares() == []


async def test_what_is_in_this_hosts_memory_under_another_name_is_not_brought(world: World) -> None:
    """As between containers of one machine that share their memory."""
    version = world.origin.publish()
    other = Mirror(
        world.origin.arena, world.origin.transport(), world.port, RUN, "another-name", stopping=world.stopping
    )
    world.mirrors.append(other)
    assert other.wants(version.sealed) == []
    other.holds(version.sealed)


async def test_what_this_host_published_is_not_brought_again(world: World) -> None:
    version = world.origin.publish()
    mirror = world.mirror(world.origin)
    assert mirror.wants(version.sealed) == []
    assert (await mirror.pull(version.sealed)).kind == "held"
    assert len(world.origin.arena.segments(RUN)) == 1


async def test_an_unsealed_version_comes_as_it_grows_and_is_held_when_it_is_sealed(world: World, sites: Sites) -> None:
    first, second = sites("first"), sites("second")
    version = world.origin.publish(chunks=3)
    await world.port.announce(world.fence, VERSION, encode(version.manifest))
    pulls = [asyncio.create_task(world.mirror(site).pull(version.manifest)) for site in (first, second)]
    for site in (first, second):
        await wait_until(lambda site=site: ready(site) == 3, f"{site.name} has what is there")
    assert all(there(site.arena) is None for site in (first, second))
    version.grow(4)
    for site in (first, second):
        await wait_until(lambda site=site: ready(site) == 7, f"{site.name} has all")
    assert not any(pull.done() for pull in pulls), "nobody holds what is not sealed"
    await world.seal(version)
    for pull, site in zip(pulls, (first, second), strict=True):
        assert (await pull).kind == "held"
        assert np.array_equal(there(site.arena), version.data)


def ready(site: Site) -> int:
    held = Shelf(site.arena, RUN).find(VERSION, 0, LAYOUT.nbytes, LAYOUT.chunk_bytes)
    if held is None:
        return -1
    chunks = held.segment.ready()
    held.close()
    return chunks


@pytest.mark.parametrize("count", [4, 8])
async def test_however_many_mirrors_pull_the_origin_sends_about_once(world: World, sites: Sites, count: int) -> None:
    layout = Layout.of([("w", "bfloat16", (1 << 20, 8))], chunk_bytes=1 << 20)
    hosts = [sites(f"m{number}") for number in range(count)]
    version = world.origin.publish(layout=layout)
    await world.seal(version)
    outcomes = await asyncio.gather(*(world.mirror(host).pull(version.sealed) for host in hosts))
    assert [outcome.kind for outcome in outcomes] == ["held"] * count
    for host in hosts:
        assert np.array_equal(there(host.arena, layout=layout), version.data)
    assert world.origin.server.stats().sent_bytes <= 2 * layout.nbytes


async def test_bytes_that_the_trainer_did_not_mean_are_replaced_before_the_version_is_held(
    world: World, sites: Sites
) -> None:
    """The origin has other bytes than the manifest says, with digests of its own; another host has the right ones."""
    here, other = sites("here"), sites("other")
    right = other.publish()
    wrong = world.origin.publish(seed=9)
    begun = replace(right.manifest, parts=wrong.manifest.parts)
    sealed = replace(begun, parts=(replace(begun.parts[0], digests=right.sealed.parts[0].digests),), sealed=True)
    await world.port.announce(world.fence, VERSION, encode(begun))
    mirror = world.mirror(here)
    pull = asyncio.create_task(mirror.pull(begun))
    await wait_until(lambda: ready(here) == 7, "all of the wrong ones are here")
    await world.port.publish_head(world.fence, VERSION, encode(sealed))
    assert (await pull).kind == "held"
    assert np.array_equal(there(here.arena), right.data)
    assert len(here.arena.segments(RUN)) == 1


async def test_a_version_gives_way_to_a_newer_one_but_not_twice_in_a_row(world: World, sites: Sites) -> None:
    here = sites("here")
    mirror = world.mirror(here)
    older = world.origin.publish(PolicyVersion(1, 1), chunks=1)
    newest = [world.origin.publish(PolicyVersion(1, step), seed=step) for step in (2, 3)]
    pull = asyncio.create_task(mirror.pull(older.manifest))
    await world.seal(newest[0])
    assert (await pull).kind == "skipped"
    assert here.arena.segments(RUN) == [], "nothing of it is left"
    await world.seal(newest[1])
    assert (await mirror.pull(newest[0].sealed)).kind == "held", "a second one in a row is finished"


async def test_a_version_that_does_not_come_gives_way_however_often_that_is(world: World, sites: Sites) -> None:
    mirror = world.mirror(sites("here"))
    for step in (1, 3):
        stuck = world.origin.publish(PolicyVersion(1, step), chunks=1)
        pull = asyncio.create_task(mirror.pull(stuck.manifest))
        await world.seal(world.origin.publish(PolicyVersion(1, step + 1)))
        assert (await pull).kind == "skipped"


async def test_a_version_that_nobody_has_vanishes_and_leaves_nothing(world: World, sites: Sites) -> None:
    here = sites("here")
    version = world.origin.publish(chunks=2)
    mirror = world.mirror(here)
    pull = asyncio.create_task(mirror.pull(version.manifest))
    await wait_until(lambda: ready(here) == 2, "it has begun")
    version.segment.discard()
    outcome = await pull
    assert outcome.kind == "vanished"
    assert "does not have it" in outcome.reason
    assert here.arena.segments(RUN) == []
    assert mirror.needed() == set()


async def test_a_version_that_another_trainer_overtakes_unsealed_is_given_up(world: World, sites: Sites) -> None:
    here = sites("here")
    version = world.origin.publish(chunks=7)
    pull = asyncio.create_task(world.mirror(here).pull(version.manifest))
    await wait_until(lambda: ready(here) == 7, "all is here but the seal")
    newer = world.origin.publish(PolicyVersion(2, 0), chunks=0)
    await world.port.announce(world.fence, PolicyVersion(2, 0), encode(newer.manifest))
    assert (await pull).kind == "vanished"


async def test_stopping_ends_a_pull_and_leaves_nothing(world: World, sites: Sites) -> None:
    here = sites("here")
    version = world.origin.publish(chunks=2)
    pull = asyncio.create_task(world.mirror(here).pull(version.manifest))
    await wait_until(lambda: ready(here) == 2, "it has begun")
    world.stopping.set()
    assert (await pull).kind == "stopped"
    assert here.arena.segments(RUN) == []


async def test_a_cancelled_pull_leaves_nothing(world: World, sites: Sites) -> None:
    here = sites("here")
    version = world.origin.publish(chunks=2)
    pull = asyncio.create_task(world.mirror(here).pull(version.manifest))
    await wait_until(lambda: ready(here) == 2, "it has begun")
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    assert here.arena.segments(RUN) == []
    await wait_until(lambda: world.origin.server.uploads == 0, "its slot is free")


async def test_what_a_dead_service_had_begun_is_begun_again(world: World, sites: Sites) -> None:
    here = sites("here")
    left = here.publish(chunks=2)
    name = SegmentName.parse(left.segment.name)
    assert name is not None
    dead = replace(name, owner=replace(name.owner, start=name.owner.start + 1))
    (here.arena.folder / str(name)).rename(here.arena.folder / str(dead))
    version = world.origin.publish()
    outcome: Outcome = await world.mirror(here).pull(version.sealed)
    assert outcome.kind == "held"
    assert len(here.arena.segments(RUN)) == 1
    assert np.array_equal(there(here.arena), content(LAYOUT))
