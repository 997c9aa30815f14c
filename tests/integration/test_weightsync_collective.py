"""Versions come through torch.distributed pairs; whatever happens to an end of one, they come, and nobody hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.api import RunRecord
from broker.connect import Run, connect_run, connect_runs
from headrace.config import Config, WeightsConfig
from headrace.errors import WeightError
from headrace.version import PolicyVersion
from tests.bulk import LAYOUT, RUN, SECRET, Publication, Site, Sites
from tests.conftest import BROKER
from tests.support import wait_until
from tests.weights import flip
from weightsync.arena import Arena
from weightsync.bulk import pairs
from weightsync.bulk.pairs import Hosting, PairBroken, ReceivingEnd, usable_backends
from weightsync.bulk.server import BulkServer
from weightsync.bulk.shelf import Shelf
from weightsync.choosing import backends_of, transport_of
from weightsync.digests import Pace
from weightsync.manifest import encode
from weightsync.mirror import Mirror
from weightsync.owners import Owner
from weightsync.placement import Bytes, Placement
from weightsync.transports.api import Source, Unavailable
from weightsync.transports.collective import CollectiveTransport, PairDownload

PLUGIN = "tests.ucc_backend"
PATIENT_S = 20.0
"""For what should not stall: the machine may be busy."""
CHUNKS = LAYOUT.chunks(0)


UCC = WeightsConfig(transport="collective", collective_backend="ucc")


@pytest.fixture
def record(run_id: str) -> RunRecord:
    return RunRecord(run_id, 1, Config(weights=UCC).model_dump(mode="json"), {}, vocab_size=10)


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Sites]:
    made = Sites(tmp_path)
    yield made
    made.close()


@asynccontextmanager
async def collective(site: Site, *backends: str, stall_s: float = PATIENT_S) -> AsyncIterator[CollectiveTransport]:
    transport = CollectiveTransport(site.transport(stall_s=stall_s), backends)
    yield transport
    await transport.close()


async def rest(source: Source, out: Bytes, at: int) -> None:
    """Bring the chunks from `at` on into their places."""
    place = Placement(LAYOUT, 0, out)
    while at < CHUNKS:
        at += len(await fetched(source, range(at, at + 1), place))


@pytest.mark.parametrize("backend", ["gloo", "ucc"])
async def test_a_mirror_pulls_versions_by_collective(
    backend: str, sites: Sites, record: RunRecord, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if backend == "ucc":
        monkeypatch.setenv("HEADRACE_TORCH_BACKENDS", PLUGIN)
    caplog.set_level(logging.INFO)
    here, origin = sites("here"), sites("origin", backends=(backend, "gloo"), stall_s=PATIENT_S)
    runs = connect_runs(f"memory:{record.run_id}", BROKER)
    await runs.create(replace(record, run_id=RUN))
    port = connect_run(f"memory:{record.run_id}", RUN, BROKER)
    fence = await port.take_fence(0)
    async with collective(here, backend) as transport:
        mirror = Mirror(here.arena, transport, port, RUN, here.name, stopping=asyncio.Event(), block_ms=50)
        for step in (1, 2):
            version = origin.publish(PolicyVersion(1, step), seed=step, chunks=3)
            await port.announce(fence, version.manifest.version, encode(version.manifest))
            pulling = asyncio.create_task(mirror.pull(version.manifest))
            await wait_until(lambda: mirror.progress is not None and mirror.progress.chunks == 3, "three came", 60)
            version.grow(CHUNKS - 3)
            await port.publish_head(fence, version.manifest.version, encode(version.sealed))
            outcome = await pulling
            assert (outcome.kind, outcome.transport) == ("held", f"collective-{backend}")
            assert (outcome.full_bytes, outcome.delta_bytes) == (LAYOUT.nbytes, 0)
            assert np.array_equal(held(here.arena, version), version.data)
    assert origin.server.stats().pair_chunks == 2 * CHUNKS
    assert transport.stats().failures == 0
    # One pair for both versions, which each end tells once.
    said = [line for line in caplog.messages if "collective" in line]
    assert sum(f"backend {backend}" in line for line in said) == len(said) == 2
    await port.close()
    await runs.close()


def held(arena: Arena, version: Publication) -> Bytes:
    found = Shelf(arena, RUN).whole(version.manifest.version, 0, LAYOUT.nbytes, LAYOUT.chunk_bytes)
    assert found is not None
    out = np.zeros(LAYOUT.nbytes, np.uint8)
    found.segment.read(0, [out.data])
    found.close()
    return out


def pid_here(download: PairDownload) -> int:
    assert download._pair is not None
    return download._pair.pid


def pid_there(origin: Site) -> int:
    (end,) = origin.server._hosting._ends
    return end.pid


@pytest.mark.parametrize(
    ("signal_", "where"), [(signal.SIGKILL, "there"), (signal.SIGSTOP, "here"), (signal.SIGSTOP, "there")]
)
async def test_a_process_that_dies_or_stops_mid_way_costs_a_line_and_nothing_else(
    signal_: signal.Signals, where: str, sites: Sites, caplog: pytest.LogCaptureFixture
) -> None:
    here, origin = sites("here"), sites("origin", backends=("gloo",), stall_s=1.0)
    version = origin.publish(chunks=3)
    out = np.zeros(LAYOUT.nbytes, np.uint8)
    async with collective(here, "gloo", stall_s=2.0) as transport:
        source = await transport.open(version.manifest, 0)
        assert not isinstance(source, Unavailable)
        assert len(await fetched(source, range(3), Placement(LAYOUT, 0, out))) == 3
        assert transport.kind == "collective-gloo"
        ours, theirs = pid_here(source._download), pid_there(origin)  # type: ignore[attr-defined]
        os.kill(ours if where == "here" else theirs, signal_)
        version.grow(CHUNKS - 3)
        await rest(source, out, 3)
        assert np.array_equal(out, version.data)
        assert transport.kind == "tcp"
        warned = [line for line in caplog.messages if "not by collective" in line]
        assert len(warned) == 1
        await source.close()
        # What comes next goes by TCP as well, without another line.
        again = await transport.open(version.sealed, 0)
        assert not isinstance(again, Unavailable)
        await rest(again, out, 0)
        await again.close()
        assert [line for line in caplog.messages if "not by collective" in line] == warned
        for pid in (ours, theirs):
            await wait_until(lambda pid=pid: gone(pid), f"process {pid} is gone", 60)
    assert 3 <= origin.server.stats().pair_chunks < CHUNKS


def gone(pid: int) -> bool:
    """A process that nobody has waited for yet counts as gone."""
    return not replace(Owner.this(), pid=pid, start=started(pid)).lives(Path("/dev/shm"))


def started(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return -1


async def test_what_is_cancelled_ends_at_once_and_leaves_no_process(
    sites: Sites, caplog: pytest.LogCaptureFixture
) -> None:
    here, origin = sites("here"), sites("origin", backends=("gloo",), wait_s=PATIENT_S)
    version = origin.publish(chunks=3)
    place = Placement(LAYOUT, 0, np.zeros(LAYOUT.nbytes, np.uint8))
    async with collective(here, "gloo") as transport:
        opening = asyncio.create_task(transport.open(version.manifest, 0))
        await wait_until(lambda: len(ends()) == 2, "both ends begin")
        await cancelled(opening)
        await wait_until(lambda: not ends(), "both are gone", 60)
        source = await transport.open(version.manifest, 0)
        assert not isinstance(source, Unavailable)
        assert len(ends()) == 2
        assert len(await fetched(source, range(3), place)) == 3
        fetching = asyncio.create_task(source.fetch(range(3, 4), place, Pace()))
        await wait_until(lambda: source._download._busy, "it waits for what is not there yet")  # type: ignore[attr-defined]
        await cancelled(fetching)
        await source.close()
        await wait_until(lambda: not ends(), "both are gone", 60)
    assert not [line for line in caplog.messages if "not by collective" in line]


async def test_an_origin_that_comes_back_elsewhere_leaves_no_process(sites: Sites) -> None:
    here, origin = sites("here"), sites("origin", backends=("gloo",))
    version = origin.publish()
    async with collective(here, "gloo") as transport:
        source = await transport.open(version.sealed, 0)
        assert not isinstance(source, Unavailable)
        first = pid_here(source._download)  # type: ignore[attr-defined]
        await source.close()
        transport._not_before["192.0.2.1:1"] = 0.0
        origin.server.close()
        server = BulkServer(origin.arena, RUN, SECRET, backends=("gloo",))
        sites.book["origin"] = server.address
        again = await transport.open(version.sealed, 0)
        assert not isinstance(again, Unavailable)
        assert transport.kind == "collective-gloo"
        assert gone(first)
        assert not transport._not_before
        await again.close()
    server.close()


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def fetched(source: Source, chunks: range, place: Placement) -> list[bytes]:
    got = await source.fetch(chunks, place, Pace())
    assert not isinstance(got, Unavailable), got.reason
    return got


def ends() -> list[int]:
    """Processes of pairs that this one has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"weightsync.transports.pair" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


async def test_a_damaged_chunk_is_noticed(sites: Sites, caplog: pytest.LogCaptureFixture) -> None:
    here, origin = sites("here"), sites("origin", backends=("gloo",))
    version = origin.publish()
    flip(origin.arena.folder / version.segment.name, 0)
    place = Placement(LAYOUT, 0, np.zeros(LAYOUT.nbytes, np.uint8))
    async with collective(here, "gloo") as transport:
        source = await transport.open(version.sealed, 0)
        assert not isinstance(source, Unavailable)
        assert await fetched(source, range(1), place) == []
        await source.close()
        assert transport.stats().bad_chunks, "TCP notices it as well"
    (line,) = [line for line in caplog.messages if "not by collective" in line]
    assert line.endswith("chunk 0 was damaged on the way")


async def test_ends_that_share_no_backend_go_by_tcp(sites: Sites, caplog: pytest.LogCaptureFixture) -> None:
    here, origin = sites("here"), sites("origin", backends=("gloo",))
    version = origin.publish()
    out = np.zeros(LAYOUT.nbytes, np.uint8)
    async with collective(here, "ucc") as transport:
        source = await transport.open(version.sealed, 0)
        assert not isinstance(source, Unavailable)
        await rest(source, out, 0)
        await source.close()
        assert transport.kind == "tcp"
    assert np.array_equal(out, version.data)
    (line,) = [line for line in caplog.messages if "not by collective" in line]
    assert line.endswith("it refuses: it offers gloo, this end ucc")
    assert origin.server.stats().pair_chunks == 0


def test_without_the_token_nobody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "JOIN_S", 3.0)
    hosting = Hosting(("gloo",), 1.0)
    sending, backend = hosting.begin(("gloo",))
    receiving = ReceivingEnd(1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    with connection, accepted:
        offer = sending.host(backend, accepted)
        with pytest.raises(PairBroken):
            receiving.join(replace(offer, token="0" * 32), connection)
        with pytest.raises(PairBroken):
            sending.joined()
    assert not receiving.alive
    receiving.close()
    hosting.end(sending)


@pytest.mark.parametrize("until", ["c.backends()", "c._comes(60)"], ids=["heard", "unheard"])
def test_a_process_ends_with_the_one_that_started_it(until: str) -> None:
    """Also when its last answer was never read."""
    code = f"from weightsync.bulk.pairs import Child; c = Child(); {until}; print(c.pid, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert not gone(child)
        parent.kill()
    asyncio.run(wait_until(lambda: gone(child), "the child is gone", 60))


async def test_a_backend_that_is_wanted_and_not_there_is_a_sentence(
    run: Run, redis_url: str, record: RunRecord
) -> None:
    sentence = r'collective_backend = "ucc".* built without UCC.* torch-ucc.* "auto"'
    with pytest.raises(WeightError, match=sentence):
        await transport_of(UCC, run, record.run_id, "here", print)
    known = {"HEADRACE_REDIS_URL": redis_url, "HEADRACE_RUN": record.run_id}
    service = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "weightsync", env={**os.environ, **known}, stderr=asyncio.subprocess.PIPE
    )
    _, said = await service.communicate()
    assert service.returncode == WeightError.exit_code
    assert re.search(sentence, said.decode())
    assert await backends_of(WeightsConfig(collective_backend="ucc")) == ()


def test_what_torch_has_is_found_and_plugins_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TORCH_BACKENDS", PLUGIN)
    found = usable_backends("auto")
    assert found[-2:] == ("ucc", "gloo")
    monkeypatch.setenv("HEADRACE_TORCH_BACKENDS", "no_such_module")
    with pytest.raises(WeightError, match="does not load here: No module named 'no_such_module'"):
        usable_backends("auto")
