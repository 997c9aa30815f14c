"""What a server says is done and is not, and what becomes of updates that it refuses: all found out, nothing hangs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from producers.engines.remote.checksums import checksums_of
from producers.engines.remote.staged import Staged
from producers.engines.remote.updating import UpdateFailed
from producers.engines.sglang import tensor
from producers.engines.sglang.client import ServerGone, ServerRefused, SglangClient
from producers.engines.sglang.collective import CollectiveMeans
from producers.engines.sglang.launch import Server
from producers.engines.sglang.loading import capabilities
from producers.engines.sglang.updates import Updater
from tests.sglang_weights import assert_serves, decoding, fresh, renamed, stage, tiny_layout
from weightsync.manifest import Layout


@pytest.fixture
def staged(sglang_model: Path, tmp_path: Path) -> Iterator[Staged]:
    found = fresh(tmp_path, sglang_model)
    yield found
    found.close()


@pytest_asyncio.fixture
async def updater(sglang_client: SglangClient) -> AsyncIterator[Updater]:
    found = Updater(sglang_client, await capabilities(sglang_client), "recompute", "folder")
    yield found
    await found.close()


async def label_of(client: SglangClient) -> str:
    return str((await client.model_info())["weight_version"])


async def test_a_name_that_the_server_does_not_know_is_found_before_anything_is_loaded(
    sglang_client: SglangClient, sglang_model: Path, tmp_path: Path, staged: Staged, updater: Updater
) -> None:
    await updater.update(staged, str(stage(staged, 1)))
    shapes = [(spec.name.replace("down_proj", "down_prox"), spec.dtype, spec.shape) for spec in tiny_layout().tensors]
    other = Staged(Layout.of(shapes), sglang_model, "tests", tmp_path)
    other.seal(stage(staged, 2))
    with pytest.raises(
        UpdateFailed, match=r"no tensor for 2 of the version's \(model.layers.0.mlp.down_prox"
    ) as caught:
        await updater.update(other, "1.2")
    assert not caught.value.half_way
    with pytest.raises(UpdateFailed, match="no tensor for 2"):
        await updater.reload(other, "1.2")
    await assert_serves(sglang_client, 1)
    # That is why: the server would have said that it had loaded it.
    payload = tensor.pickled(other, [spec for spec in other.layout.tensors if "down_prox" in spec.name])
    before = checksums_of(await sglang_client.weights_checker())
    await sglang_client.begin_weight_update()
    answer = await sglang_client.update_weights_from_tensor(serialized_named_tensors=[payload], weight_version="lie")
    await sglang_client.end_weight_update()
    assert answer["success"]
    assert await label_of(sglang_client) == "lie"
    assert checksums_of(await sglang_client.weights_checker()) == before


async def test_a_folder_that_lacks_a_tensor_is_found_out_and_reloaded(
    sglang_client: SglangClient, staged: Staged, updater: Updater
) -> None:
    await updater.update(staged, str(stage(staged, 1)))
    stage(staged, 2)
    renamed(staged, "model.norm.weight", "model.nose.weight")
    async with decoding(sglang_client, 2, 300) as requests:
        with pytest.raises(
            UpdateFailed, match=r"says that it has loaded the version, but 1 of 14 .*: model\.norm\.weight"
        ) as caught:
            await updater.update(staged, "1.2")
        assert caught.value.half_way
        assert await label_of(sglang_client) == "1.2", "it says that it has it"
        # It stays paused: nothing is sampled from a mixture.
        assert not any(request.done() for request in requests)
        await updater.reload(staged, str(stage(staged, 3)))
        answers = await asyncio.gather(*requests)
    await assert_serves(sglang_client, 3)
    for answer in answers:
        assert len(answer.output_ids) == 300
        assert [span.version for span in answer.meta_info.weight_versions or ()] in (
            ["1.1", "1.2", "1.3"],
            ["1.1", "1.3"],
        )


async def test_a_server_with_a_half_goes_on_only_when_it_has_a_whole_one(
    sglang_client: SglangClient, staged: Staged, updater: Updater, monkeypatch: pytest.MonkeyPatch
) -> None:
    await updater.update(staged, str(stage(staged, 1)))
    stage(staged, 2)
    renamed(staged, "model.norm.weight", "model.nose.weight")
    async with decoding(sglang_client, 1, 300) as requests:
        with pytest.raises(UpdateFailed):
            await updater.update(staged, "1.2")
        # Whatever fails now has not touched it, which makes no whole of the half.
        staged.file.rename(staged.folder / "elsewhere")
        with pytest.raises(UpdateFailed, match="Failed to get weights iterator") as caught:
            await updater.reload(staged, "1.2")
        assert caught.value.half_way
        (staged.folder / "elsewhere").rename(staged.file)

        async def away(mode: str) -> object:
            raise ServerGone("the network is away")

        monkeypatch.setattr(sglang_client, "pause_generation", away)
        with pytest.raises(UpdateFailed, match="the network is away") as caught:
            await updater.reload(staged, "1.2")
        assert caught.value.half_way
        monkeypatch.undo()
        before = (await sglang_client.loads()).total()
        assert before.running + before.queued == 1
        assert not requests[0].done()
        await updater.reload(staged, str(stage(staged, 2)))
        assert len((await requests[0]).output_ids) == 300
    await assert_serves(sglang_client, 2)


async def test_a_request_that_lacks_a_tensor_is_found_out_and_reloaded(
    sglang_client: SglangClient, staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = Updater(sglang_client, await capabilities(sglang_client), "recompute", "tensor")
    await updater.update(staged, str(stage(staged, 1)))
    real = tensor.pickled
    monkeypatch.setattr(tensor, "pickled", lambda staged, specs: real(staged, specs[:-1]))
    with pytest.raises(UpdateFailed, match="but 1 of 14 tensors have other checksums") as caught:
        await updater.update(staged, str(stage(staged, 2)))
    assert caught.value.half_way
    monkeypatch.undo()
    await updater.reload(staged, "1.2")
    await assert_serves(sglang_client, 2)


async def test_a_folder_that_cannot_be_read_is_a_clean_refusal(
    sglang_client: SglangClient, staged: Staged, updater: Updater
) -> None:
    await updater.update(staged, str(stage(staged, 1)))
    stage(staged, 2)
    async with decoding(sglang_client, 1, 200) as requests:
        staged.file.rename(staged.folder / "elsewhere")
        with pytest.raises(UpdateFailed, match=r"did not come into .*: Failed to get weights iterator") as caught:
            await updater.update(staged, "1.2")
        assert not caught.value.half_way
        # It goes on with what it had.
        assert len((await requests[0]).output_ids) == 200
    assert await label_of(sglang_client) == "1.1"
    await assert_serves(sglang_client, 1)


async def test_a_cache_that_cannot_be_flushed_fails_an_update_that_is_loaded(
    sglang_client: SglangClient, staged: Staged, updater: Updater
) -> None:
    """Why no update flushes by itself: in place it would be loaded, refused, and booked by one half of the server."""
    await updater.update(staged, str(stage(staged, 1)))
    stage(staged, 2)
    async with decoding(sglang_client, 1, 300) as requests:
        await sglang_client.pause_generation("in_place")
        with pytest.raises(ServerRefused, match="Weights were updated, but the cache was not flushed"):
            await sglang_client.update_weights_from_disk(
                model_path=str(staged.folder), weight_version="1.2", flush_cache=True
            )
        assert await label_of(sglang_client) == "1.1"
        await sglang_client.continue_generation()
        answer = await requests[0]
    assert [span.version for span in answer.meta_info.weight_versions or ()] == ["1.1", "1.2"]
    await updater.reload(staged, "1.2")
    assert await label_of(sglang_client) == "1.2"
    await assert_serves(sglang_client, 2)


async def test_tensors_are_taken_only_within_a_session(sglang_client: SglangClient, staged: Staged) -> None:
    stage(staged, 1)
    payload = tensor.pickled(staged, staged.layout.tensors[:1])
    with pytest.raises(ServerRefused, match="must run between begin_weight_update"):
        await sglang_client.update_weights_from_tensor(serialized_named_tensors=[payload])
    with pytest.raises(ServerRefused, match="must run between begin_weight_update"):
        await sglang_client.update_weights_from_distributed(
            names=["model.norm.weight"], dtypes=["float32"], shapes=[[64]], group_name="none"
        )


@pytest.mark.parametrize("means", ["tensor", "collective"])
async def test_a_session_that_somebody_left_open_is_closed(
    means: str, sglang_client: SglangClient, staged: Staged
) -> None:
    await sglang_client.begin_weight_update()
    updater = Updater(sglang_client, await capabilities(sglang_client), "recompute", means)
    try:
        await updater.update(staged, str(stage(staged, 2)))
        await assert_serves(sglang_client, 2)
    finally:
        await updater.close()


def child_of(updater: Updater) -> int:
    assert isinstance(updater._means, CollectiveMeans)
    assert updater._means.pid is not None
    return updater._means.pid


async def test_a_broadcast_that_the_server_refuses_leaves_nobody_waiting(
    sglang_client: SglangClient, staged: Staged
) -> None:
    updater = Updater(sglang_client, await capabilities(sglang_client), "recompute", "collective")
    try:
        await updater.update(staged, str(stage(staged, 1)))
        child = child_of(updater)
        assert isinstance(updater._means, CollectiveMeans)
        assert updater._means._group is not None
        await sglang_client.destroy_weights_update_group(group_name=updater._means._group.name)
        with pytest.raises(UpdateFailed, match="Please call `init_weights_update_group` first") as caught:
            await updater.update(staged, str(stage(staged, 2)))
        assert caught.value.half_way
        assert not psutil.pid_exists(child)
        await updater.reload(staged, "1.2")
        await assert_serves(sglang_client, 2)
        assert child_of(updater) != child
    finally:
        await updater.close()


async def test_our_end_that_dies_is_replaced(sglang_client: SglangClient, staged: Staged) -> None:
    updater = Updater(sglang_client, await capabilities(sglang_client), "recompute", "collective")
    try:
        await updater.update(staged, str(stage(staged, 1)))
        os.kill(child_of(updater), signal.SIGKILL)
        psutil.Process(child_of(updater)).wait(10)
        await updater.update(staged, str(stage(staged, 2)))
        await assert_serves(sglang_client, 2)
        last = child_of(updater)
    finally:
        await updater.close()
    assert not psutil.pid_exists(last)


async def test_a_wrong_shape_that_is_broadcast_is_refused_and_reloaded(
    sglang_client: SglangClient, staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = Updater(sglang_client, await capabilities(sglang_client), "recompute", "collective")
    try:
        await updater.update(staged, str(stage(staged, 1)))
        real = sglang_client.update_weights_from_distributed

        async def bent(*, shapes: list[list[int]], **fields: object) -> object:
            return await real(shapes=[*shapes[:-1], [32, 2]], **fields)

        monkeypatch.setattr(sglang_client, "update_weights_from_distributed", bent)
        with pytest.raises(UpdateFailed, match="partially updated") as caught:
            await updater.update(staged, str(stage(staged, 2)))
        assert caught.value.half_way
        monkeypatch.undo()
        await updater.reload(staged, "1.2")
        await assert_serves(sglang_client, 2)
    finally:
        await updater.close()


async def test_a_server_that_hangs_ends_with_the_deadline_and_is_reloaded_when_it_wakes(
    sglang_client: SglangClient, sglang_server: Server, staged: Staged
) -> None:
    updater = Updater(sglang_client, await capabilities(sglang_client), "recompute", "folder", base_s=8.0)
    await updater.update(staged, str(stage(staged, 1)))
    stage(staged, 2)
    real = sglang_client.update_weights_from_disk

    async def into_a_stopped_one(**fields: object) -> object:
        os.killpg(sglang_server.pid, signal.SIGSTOP)
        return await real(**fields)

    sglang_client.update_weights_from_disk = into_a_stopped_one
    try:
        with pytest.raises(UpdateFailed, match="nothing came back within 8 s") as caught:
            await updater.update(staged, "1.2")
    finally:
        os.killpg(sglang_server.pid, signal.SIGCONT)
        sglang_client.update_weights_from_disk = real
    assert caught.value.half_way
    patient = Updater(sglang_client, await capabilities(sglang_client), "recompute", "folder")
    await patient.reload(staged, str(stage(staged, 3)))
    await assert_serves(sglang_client, 3)
