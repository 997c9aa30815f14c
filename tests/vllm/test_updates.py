"""Weight updates of a real vLLM server that would leave something old: found before the load, or by its checksums."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import EngineError, WeightError
from headrace.policy.loading import layout_of
from producers.engines.openai.client import CompletionsClient
from producers.engines.openai.engine import OpenAIEngine
from producers.engines.openai.options import Options
from producers.engines.openai.probing import probe
from producers.engines.openai.updates import Updater
from producers.engines.remote.staged import Staged
from tests.remote_engines import FIRST, PROMPT, apart, ask, scored, sealed, stage
from tests.support import wait_until
from tests.vllm.test_engine import BOUND
from tests.vllm_servers import CONTEXT, START_S, VllmServer, save_small_llama, small_llama
from weightsync.manifest import Layout

pytestmark = pytest.mark.timeout(600)
"""A server takes a minute to start, and several where others use the cores."""


class _LoadsAnother(CompletionsClient):
    """Has the server load a folder that is not the one it was told of: success is answered all the same."""

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(url)
        self._folder = folder

    async def reload_weights(self, folder: str) -> None:
        await super().reload_weights(str(self._folder))


@pytest.fixture
def staged(vllm_model: Path) -> Iterator[Staged]:
    """Seed 1, sealed."""
    with sealed(small_llama(1), vllm_model) as staged:
        yield staged


async def nothing_open() -> None:
    pass


async def test_a_server_that_loaded_something_else_is_found_out_and_stays_paused(
    vllm_client: CompletionsClient, vllm_model: Path, staged: Staged
) -> None:
    async with _LoadsAnother(vllm_client.url, vllm_model) as client:
        with pytest.raises(WeightError, match=r"says that it has loaded the version, but .* tensors have other check"):
            await Updater(client, "all").update(staged, "headrace/x/1.0", nothing_open, whole=True)
    assert await vllm_client.is_paused()
    await Updater(vllm_client, "all").update(staged, "headrace/x/1.0", nothing_open, whole=True)
    assert not await vllm_client.is_paused()
    assert await vllm_client.weight_version() == "headrace/x/1.0"


async def test_a_version_that_lacks_a_tensor_is_not_loaded(vllm_server: VllmServer, vllm_model: Path) -> None:
    options = Options.model_validate({"urls": [vllm_server.url], "poll_s": 0.1, "restarts": 0})
    engine = OpenAIEngine(vllm_model, options, slots=4, context_length=256)
    await engine.start()
    try:
        whole = layout_of(small_llama(1), "float32")
        engine.back_buffer(Layout.of([one for one in whole if one[0] != "model.norm.weight"]))
        with pytest.raises(EngineError, match=r"has nothing for 1 of the server's tensors .model.norm.weight"):
            await engine.commit(FIRST)
    finally:
        await engine.close()


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmServer, Path]]:
    """A server as it starts by itself, whose model's output head is its embedding. Tests may have it load others."""
    folder = save_small_llama(tmp_path_factory.mktemp("vllm-tied"), tie_word_embeddings=True)
    server = VllmServer(folder, tmp_path_factory.mktemp("vllm-logs") / "tied.log")
    try:
        asyncio.run(server.ready())
        yield server, folder
    finally:
        server.kill()


async def test_log_probs_of_a_server_as_it_starts_by_itself_are_seen_to_be_raw(tied: tuple[VllmServer, Path]) -> None:
    server, folder = tied
    async with CompletionsClient(server.url) as client:
        found = await probe(client, "", salted=True)
    assert (found.tempered, found.filtered) == (False, False)
    options = Options.model_validate({"urls": [server.url], "updates": "none"})
    engine = OpenAIEngine(folder, options, slots=4, context_length=256)
    await engine.start()
    try:
        await engine.commit(FIRST)
        await _load(server, folder)
        done = await engine.generate(ask("t/0/0"))
        assert apart(done, small_llama(tie_word_embeddings=True)) < BOUND
        with pytest.raises(EngineError, match=r"temperature 0\.5: .*--logprobs-mode processed_logprobs"):
            await engine.generate(ask("t/1/0", temperature=0.5))
    finally:
        await engine.close()


async def _load(server: VllmServer, folder: Path) -> None:
    async with CompletionsClient(server.url) as client:
        await client.pause()
        await client.reload_weights(str(folder))
        await client.resume()


async def test_a_tied_head_stays_old_and_the_update_is_refused(tied: tuple[VllmServer, Path], tmp_path: Path) -> None:
    """Why it is refused: the server answers success, and samples from a mixture."""
    server, folder = tied
    options = Options.model_validate({"urls": [server.url], "restarts": 0})
    engine = OpenAIEngine(folder, options, slots=4, context_length=256)
    await engine.start()
    try:
        stage(engine, small_llama(1, tie_word_embeddings=True))
        with pytest.raises(EngineError, match=r"output head that is tied .* a reload leaves old"):
            await engine.commit(FIRST)
    finally:
        await engine.close()
    other = save_small_llama(tmp_path, 1, tie_word_embeddings=True)
    await _load(server, other)
    async with CompletionsClient(server.url) as client:
        body = {"model": "tiny", "prompt": list(PROMPT), "max_tokens": 8, "logprobs": 0, "return_token_ids": True}
        answer = (await client.complete({**body, "temperature": 1.0, "cache_salt": "new"})).choice
    assert answer.token_ids is not None
    assert answer.logprobs is not None
    logprobs = np.array(answer.logprobs.token_logprobs, np.float32)
    right = scored(small_llama(1, tie_word_embeddings=True), PROMPT, answer.token_ids)
    assert np.abs(logprobs - right).max() > 0.05, "vLLM renews it now: the refusal can go"


async def test_a_server_that_is_killed_and_comes_back_goes_on(tied: tuple[VllmServer, Path]) -> None:
    server, folder = tied
    options = Options.model_validate({"urls": [server.url], "updates": "none", "poll_s": 0.1, "outage_s": START_S})
    engine = OpenAIEngine(folder, options, slots=4, context_length=CONTEXT)
    await engine.start()
    try:
        await engine.commit(FIRST)
        call = asyncio.create_task(engine.generate(ask("t/0/0", max_new_tokens=CONTEXT - 40)))
        await engine.generate(ask("t/1/0", max_new_tokens=2))
        server.kill()
        await wait_until(lambda: engine.replicas[0].state == "broken", "it is found out")
        server.restart()
        done = await call
        assert len(done.token_ids_N) == CONTEXT - 40
        assert apart(done, small_llama(tie_word_embeddings=True)) < BOUND
    finally:
        await engine.close()
