"""Servers that die of an update, or in the middle of one: found out at once, in a sentence, never waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from producers.engines.remote.staged import Staged
from producers.engines.remote.updating import UpdateFailed
from producers.engines.sglang.client import SglangClient
from producers.engines.sglang.launch import Server
from producers.engines.sglang.loading import MeansName, capabilities
from producers.engines.sglang.updates import Updater
from tests.sglang_servers import tiny_spec
from tests.sglang_weights import ROOM, assert_serves, body, fresh, patched, stage

pytestmark = pytest.mark.timeout(900)
"""Each starts servers, for a minute where others use the machine."""

Start = Callable[[Path], Awaitable[tuple[Server, SglangClient]]]


@pytest.fixture
def staged(sglang_model: Path, tmp_path: Path) -> Iterator[Staged]:
    found = fresh(tmp_path, sglang_model)
    yield found
    found.close()


@pytest_asyncio.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Servers of one's own."""
    begun: list[tuple[Server, SglangClient]] = []

    async def one(model: Path) -> tuple[Server, SglangClient]:
        spec = replace(tiny_spec(model, *ROOM, logs=tmp_path / "logs"), start_s=600.0)
        server = Server(spec, f"server-{len(begun)}")
        client = SglangClient(server.url, server.admin_key)
        begun.append((server, client))
        await server.ready(client)
        return server, client

    yield one
    for server, client in begun:
        await client.close()
        server.kill()


def truncated(staged: Staged) -> None:
    """Another file in its place, as this process has its own mapped."""
    short = staged.folder / "short"
    short.write_bytes(staged.file.read_bytes()[:-4096])
    short.replace(staged.file)


def bent(staged: Staged) -> None:
    """As many numbers, in another shape."""
    spec = next(spec for spec in staged.layout.tensors if spec.name.endswith("0.self_attn.o_proj.weight"))
    place = staged.place(spec) - staged.place(staged.layout.tensors[0])
    there = f'"data_offsets":[{place},{place + spec.nbytes}]}}'
    shape = ",".join(map(str, spec.shape))
    patched(staged, f'"shape":[{shape}],{there}'.encode(), f'"shape":[32,128],{there}'.encode())


@pytest.mark.parametrize("damage", [truncated, bent])
async def test_a_file_that_kills_the_server_is_a_failed_update_and_the_next_server_starts_from_a_whole_one(
    damage: Callable[[Staged], None], start: Start, sglang_model: Path, tmp_path: Path, staged: Staged
) -> None:
    server, client = await start(sglang_model)
    front = fresh(tmp_path, sglang_model)
    updater = Updater(client, await capabilities(client), "recompute", "folder")
    await updater.update(front, str(stage(front, 1)))
    stage(staged, 2)
    damage(staged)
    async with asyncio.timeout(120):
        with pytest.raises(UpdateFailed, match=r"did not come into http://127.0.0.1:\d+: ") as caught:
            await updater.update(staged, "1.2")
        assert caught.value.half_way
        assert await server.ended_within(60)
    if damage is truncated:
        # The folder that was committed is a whole model.
        _, again = await start(front.folder)
        await assert_serves(again, 1)
        anew = Updater(again, await capabilities(again), "recompute", "folder")
        await anew.reload(front, "1.1")
        assert (await again.model_info())["weight_version"] == "1.1"
    front.close()


@pytest.mark.parametrize("means", ["folder", "collective"])
async def test_a_server_that_is_killed_in_mid_update_ends_it(
    means: MeansName, start: Start, sglang_model: Path, staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = await start(sglang_model)
    updater = Updater(client, await capabilities(client), "recompute", means, bucket_bytes=40_000)
    try:
        await updater.update(staged, str(stage(staged, 1)))
        route = {"folder": "disk", "collective": "distributed"}[str(means)]
        real = getattr(client, f"update_weights_from_{route}")

        async def into_a_dying_one(**fields: object) -> object:
            asking = asyncio.ensure_future(real(**fields))
            if means == "folder":
                await asyncio.sleep(0)
            else:
                # One bucket is in it, the next is on its way.
                await asking
                asking = asyncio.ensure_future(real(**fields))
            server.kill()
            return await asking

        monkeypatch.setattr(client, f"update_weights_from_{route}", into_a_dying_one)
        request = asyncio.ensure_future(client.generate(body(300, "lost")))
        async with asyncio.timeout(60):
            with pytest.raises(UpdateFailed, match="cannot be reached") as caught:
                await updater.update(staged, str(stage(staged, 2)))
        assert caught.value.half_way
        await asyncio.gather(request, return_exceptions=True)
    finally:
        async with asyncio.timeout(60):
            await updater.close()
