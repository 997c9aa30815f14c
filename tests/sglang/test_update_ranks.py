"""Weight updates of a server of two tensor-parallel ranks: loaded by each means, and compared shard by shard."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from producers.engines.remote.updating import UpdateFailed
from producers.engines.sglang.client import SglangClient
from producers.engines.sglang.launch import Server
from producers.engines.sglang.loading import capabilities
from producers.engines.sglang.updates import Updater
from tests.sglang_servers import tiny_spec
from tests.sglang_weights import ROOM, assert_serves, fresh, model_of, renamed, stage
from tests.tiny import SIZES, save_tiny_llama

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A server on a CPU fills its MLP up to multiples of 32 for each rank: this one fits."""
    monkeypatch.setitem(SIZES, "intermediate_size", 128)
    model_of.cache_clear()
    yield save_tiny_llama(tmp_path / "model")
    model_of.cache_clear()


@pytest_asyncio.fixture
async def two_ranks(model: Path, tmp_path: Path) -> AsyncIterator[SglangClient]:
    spec = tiny_spec(model, *ROOM, "--tp-size", "2", logs=tmp_path / "logs")
    spec = replace(spec, env={**spec.env, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, start_s=600.0)
    server = Server(spec, "two-ranks")
    try:
        async with SglangClient(server.url, server.admin_key) as client:
            await server.ready(client)
            yield client
    finally:
        server.kill()


async def test_two_ranks_are_loaded_by_each_means_and_compared_shard_by_shard(
    two_ranks: SglangClient, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Its ranks compute together: where others use both cores, they seldom do.
    found = await capabilities(two_ranks, await two_ranks.server_info(timeout_s=600.0))
    assert found.tp_size == 2
    staged = fresh(tmp_path, model)
    for seed, means in enumerate(("folder", "tensor", "collective"), 1):
        updater = Updater(two_ranks, found, "recompute", means)
        try:
            await updater.update(staged, str(stage(staged, seed)))
            await assert_serves(two_ranks, seed)
        finally:
            await updater.close()
    assert "not compared" not in caplog.text
    updater = Updater(two_ranks, found, "recompute", "folder")
    await updater.update(staged, str(stage(staged, 4)))
    for missing in ("self_attn.k_proj", "mlp.down_proj", "mlp.up_proj"):
        stage(staged, 5)
        renamed(staged, f"model.layers.1.{missing}.weight", f"model.layers.1.{missing[:-1]}x.weight")
        with pytest.raises(UpdateFailed, match="but 1 of 14 tensors have other checksums") as caught:
            await updater.update(staged, "1.5")
        assert caught.value.half_way
        await updater.reload(staged, str(stage(staged, 5)))
        await updater.reload(staged, str(stage(staged, 4)))
    await assert_serves(two_ranks, 4)
    staged.close()
