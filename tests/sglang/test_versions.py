"""Versions of tokens under updates in flight, each checked against the weights that it names."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaForCausalLM

from broker.messages import Float32
from headrace.version import PolicyVersion
from producers.engines.api import Completion
from producers.engines.sglang.client import SglangClient
from producers.engines.sglang.launch import Server
from tests.remote_engines import PROMPT, apart, ask, replayed, scored, stage
from tests.sglang_servers import engine_at
from tests.support import wait_until
from tests.tiny import save_tiny_llama, tiny_llama

Models = Mapping[PolicyVersion, LlamaForCausalLM]
BOUND = 3e-4
"""Nats, in float32."""


def version(step: int) -> PolicyVersion:
    return PolicyVersion(1, step)


def over_one_cache(models: Models, prompt: tuple[int, ...], done: Completion) -> Float32:
    """Log-probs of N tokens by a model whose weights are swapped where the spans say so."""
    versions = [span.version for span in done.spans for _ in range(span.start, span.end)]
    return replayed([models[version] for version in versions], prompt, done.token_ids_N.tolist())


def each_by_its_own(models: Models, prompt: tuple[int, ...], done: Completion) -> Float32:
    """Log-probs of N tokens, each by one pass of the version that its span names."""
    logprobs = np.zeros(len(done.token_ids_N), np.float32)
    for span in done.spans:
        whole = scored(models[span.version], prompt, done.token_ids_N.tolist())
        logprobs[span.start : span.end] = whole[span.start : span.end]
    return logprobs


@pytest.mark.parametrize(("kv", "updates"), [("keep", 30), ("recompute", 8), ("resume", 8)])
async def test_updates_in_flight_lose_nothing_and_every_token_names_its_weights(
    kv: str, updates: int, sglang_server: Server, sglang_model: Path
) -> None:
    engine = engine_at(sglang_server.url, sglang_model, kv=kv)
    await engine.start()
    two = [tiny_llama(seed, initializer_range=0.1) for seed in (1, 2)]
    models = {version(step): two[step % 2] for step in range(updates + 1)}
    stage(engine, models[version(0)])
    await engine.commit(version(0))
    prompts = {f"g{number}/0/0": (*PROMPT[:-1], 100 + number) for number in range(8)}
    finished: list[Completion] = []
    stopping = asyncio.Event()

    async def stream(name: str) -> None:
        while not stopping.is_set():
            finished.append(await engine.generate(ask(name, prompt=prompts[name], max_new_tokens=150)))

    streams = [asyncio.create_task(stream(name)) for name in prompts]
    for step in range(1, updates + 1):
        sampled = len(finished)
        await wait_until(lambda: bool(engine.replicas[0].load and engine.replicas[0].load.running), "it decodes")
        if step % 4 == 0:
            await wait_until(lambda sampled=sampled: len(finished) > sampled, "one has come to its end")  # type: ignore[misc]
        stage(engine, models[version(step)])
        await engine.commit(version(step))
    stopping.set()
    await asyncio.gather(*streams)
    assert {(len(done.token_ids_N), done.finish_reason) for done in finished} == {(150, "length")}
    crossed = [done for done in finished if len(done.spans) > 1]
    for done in finished:
        assert sorted(span.version for span in done.spans) == [span.version for span in done.spans]
        kinds = [span.kv for span in done.spans]
        assert kinds == ["fresh"] * len(kinds) if kv != "keep" else kinds[1:] == ["kept"] * (len(kinds) - 1)
    # A first span is "kept" where the request waited at the server while a version came: no reference knows how.
    known = [done for done in crossed if done.spans[0].kv == "fresh"]
    assert len({span.version for done in known for span in done.spans[1:]}) >= updates // 2
    whole = [done for done in finished if len(done.spans) == 1]
    reference = over_one_cache if kv == "keep" else each_by_its_own
    for done in [*whole[:4], *known[:: max(1, len(known) // 16)]]:
        right = reference(models, prompts[done.request_id], done)
        assert np.abs(done.logprobs_N - right).max() < BOUND
    # Not so under the first version alone: the models differ by more than the bound.
    for done in known:
        assert apart(done, models[done.spans[0].version], prompts[done.request_id]) > 10 * BOUND
    assert engine.replicas[0].state == "serving"
    await engine.close()


async def test_without_a_key_of_its_own_a_version_reads_the_old_ones_cache(
    sglang_client: SglangClient, tmp_path: Path
) -> None:
    """What `extra_key` is for: the server keeps its prefix cache over an update that was not followed by a flush."""
    folders = [save_tiny_llama(tmp_path / str(seed), seed) for seed in (1, 2)]
    prompt = list(range(60, 120))
    await sglang_client.update_weights_from_disk(model_path=str(folders[0]), weight_version="one", flush_cache=True)

    async def ask_for(key: str | None) -> tuple[int, float]:
        """Cached tokens, and how far its log-probs are from those of the second version."""
        params = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "extra_key": key}
        got = await sglang_client.generate(body)
        assert got.meta_info.output_token_logprobs is not None
        logprobs = np.array([logprob for logprob, _, _ in got.meta_info.output_token_logprobs], np.float32)
        return got.meta_info.cached_tokens, float(
            np.abs(logprobs - scored(tiny_llama(2), prompt, got.output_ids)).max()
        )

    await ask_for(None)
    await ask_for("one")
    await sglang_client.pause_generation("in_place")
    await sglang_client.update_weights_from_disk(model_path=str(folders[1]), weight_version="two")
    await sglang_client.continue_generation()
    for stale in (None, "one"):
        cached, off = await ask_for(stale)
        assert cached > 50
        assert off > 10 * BOUND
    cached, off = await ask_for("two")
    assert cached == 0
    assert off < BOUND
    cached, off = await ask_for("two")
    assert cached > 50
    assert off < BOUND
