"""The engine on a real vLLM server: ids, log-probs, versions and ends as the server has them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from broker.messages import Float32
from headrace.errors import EngineError
from headrace.version import PolicyVersion
from producers.engines.openai.client import CompletionsClient
from producers.engines.openai.engine import OpenAIEngine
from producers.engines.openai.options import Options
from tests.remote_engines import FIRST, PROMPT, apart, ask, letters, scored, stage
from tests.server_proxy import FaultyProxy
from tests.support import wait_until
from tests.vllm_servers import CONTEXT, VllmServer, small_llama

pytestmark = pytest.mark.timeout(600)
"""A server takes a minute to start, and several where others use the cores."""
BOUND = 1e-3
LONG = CONTEXT - 40

Make = Callable[..., Awaitable[OpenAIEngine]]


@pytest_asyncio.fixture
async def make(vllm_server: VllmServer, vllm_model: Path) -> AsyncIterator[Make]:
    """Engines on the weights of seed 1, as version 1.0."""
    made: list[OpenAIEngine] = []

    async def build(url: str = vllm_server.url, slots: int = 8, **changes: object) -> OpenAIEngine:
        options = Options.model_validate({"urls": [url], "poll_s": 0.1, **changes})
        engine = OpenAIEngine(vllm_model, options, slots=slots, context_length=4096, seed=3, decode=letters)
        made.append(engine)
        await engine.start()
        stage(engine, small_llama(1))
        await engine.commit(FIRST)
        return engine

    yield build
    for engine in made:
        await engine.close()


async def test_tokens_come_with_the_log_probs_of_the_model_that_was_committed(make: Make) -> None:
    engine = await make()
    assert engine.context_length == CONTEXT
    done = await engine.generate(ask("t/0/0"))
    assert (len(done.token_ids_N), done.finish_reason) == (12, "length")
    assert [tuple(span) for span in done.spans] == [(0, 12, FIRST, "fresh")]
    assert apart(done, small_llama(1)) < BOUND
    assert apart(done, small_llama(0)) > 0.05


async def test_log_probs_are_those_of_the_distribution_that_was_sampled_from(make: Make) -> None:
    engine = await make()
    several = [
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"temperature": 0.0},
        {"top_k": 5},
        {"top_p": 0.3},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.5},
    ]
    calls = [engine.generate(ask(f"t/{at}/0", **one)) for at, one in enumerate(several)]
    for one, done in zip(several, await asyncio.gather(*calls), strict=True):
        right = filtered(done.token_ids_N.tolist(), **one)
        assert np.abs(done.logprobs_N - right).max() < BOUND, one


def filtered(tokens: list[int], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Float32:
    """Log-probs of tokens under the model of seed 1 after temperature, top-k, then top-p; greedy: at temperature 1."""
    with torch.no_grad():
        logits_TV = small_llama(1)(torch.tensor([[*PROMPT, *tokens]])).logits[0].float() / (temperature or 1.0)
    found = []
    for place, token in enumerate(tokens, len(PROMPT) - 1):
        order = torch.argsort(logits_TV[place], descending=True)[: top_k or None]
        probs = torch.softmax(logits_TV[place, order], 0)
        # The first of those that reach top_p belong to it.
        kept = order[: int((torch.cumsum(probs, 0) - probs < top_p).sum())]
        assert token in kept.tolist()
        found.append(float(torch.log_softmax(logits_TV[place, kept], 0)[kept.tolist().index(token)]))
    return np.array(found, np.float32)


async def test_a_seed_fixes_a_request_whatever_else_is_in_the_batch(make: Make) -> None:
    engine = await make(seeds=True)
    alone = await engine.generate(ask("t/0/0", seed=5))
    same, *_ = await asyncio.gather(*(engine.generate(ask(f"t/{at}/0", seed=5 + at)) for at in range(6)))
    assert same.token_ids_N.tolist() == alone.token_ids_N.tolist()


async def test_it_ends_with_the_first_stop_token_and_goes_on_behind_the_models_own_end(make: Make) -> None:
    engine = await make(seeds=True)
    plain = (await engine.generate(ask("t/0/0", max_new_tokens=40, seed=1))).token_ids_N.tolist()
    token = plain[7]
    done = await engine.generate(ask("t/0/0", max_new_tokens=40, seed=1, stop_token_ids=(token,)))
    assert done.token_ids_N.tolist() == plain[: plain.index(token) + 1]
    assert done.finish_reason == "stop"
    assert len(plain) == 40


async def test_it_ends_with_the_token_that_completes_a_stop_string(make: Make) -> None:
    engine = await make()
    done = await engine.generate(ask("t/0/0", max_new_tokens=LONG, stop=tuple("aeio")))
    assert done.finish_reason == "stop"
    assert 0 < len(done.token_ids_N) < LONG


async def test_an_aborted_request_keeps_what_it_has(make: Make) -> None:
    engine = await make()
    call = asyncio.create_task(engine.generate(ask("t/0/0", max_new_tokens=LONG)))
    await sampling(engine, "t/1/0")
    engine.abort("t/0/0")
    done = await call
    assert done.finish_reason == "abort"
    assert 0 < len(done.token_ids_N) < LONG
    assert apart(done, small_llama(1)) < BOUND


async def sampling(engine: OpenAIEngine, name: str) -> None:
    """Whatever was asked before has begun: a short request that came later has been answered."""
    await engine.generate(ask(name, max_new_tokens=2))


async def test_updates_while_requests_run_lose_none_and_each_span_is_of_its_version(make: Make) -> None:
    engine = await make()
    models = {FIRST: small_llama(1)}
    calls = [asyncio.create_task(engine.generate(ask(f"t/{at}/0", max_new_tokens=LONG))) for at in range(6)]
    for step in range(1, 5):
        await sampling(engine, f"u/{step}/0")
        version = PolicyVersion(1, step)
        models[version] = small_llama(1 + step)
        stage(engine, models[version])
        await engine.commit(version)
    got = await asyncio.gather(*calls)
    assert max(len(done.spans) for done in got) >= 3
    for done in got:
        assert (len(done.token_ids_N), done.finish_reason) == (LONG, "length")
        tokens = done.token_ids_N.tolist()
        for span in done.spans:
            assert span.kv == "fresh"
            right = scored(models[span.version], (*PROMPT, *tokens[: span.start]), tokens[span.start : span.end])
            assert np.abs(done.logprobs_N[span.start : span.end] - right).max() < BOUND


async def test_requests_that_wait_in_the_servers_queue_outlast_many_updates(make: Make) -> None:
    """The server computes 16 at once."""
    engine = await make(slots=48)
    calls = [asyncio.create_task(engine.generate(ask(f"t/{at}/0", max_new_tokens=200))) for at in range(48)]
    for step in range(1, 9):
        await wait_until(lambda: engine.stats().busy_slots == 48 - sum(call.done() for call in calls), "all are there")
        await engine.commit(PolicyVersion(1, step))
    for done in await asyncio.gather(*calls):
        assert (len(done.token_ids_N), done.finish_reason) == (200, "length")


async def test_a_server_that_restarted_with_its_old_weights_is_found_out(
    make: Make, vllm_client: CompletionsClient, vllm_model: Path
) -> None:
    engine = await make()
    await vllm_client.pause()
    await vllm_client.reload_weights(str(vllm_model))
    await vllm_client.update_weight_version("default")
    await vllm_client.resume()
    await wait_until(lambda: engine.replicas[0].state == "broken", "it is found out")
    await wait_until(lambda: engine.replicas[0].state == "serving", "it is reloaded")
    done = await engine.generate(ask("t/0/0"))
    assert apart(done, small_llama(1)) < BOUND


async def test_a_server_that_another_engine_takes_is_given_up(make: Make, vllm_client: CompletionsClient) -> None:
    engine = await make()
    await vllm_client.update_weight_version("headrace/other.1/7.3")
    await wait_until(lambda: engine.replicas[0].state == "lost", "it is given up")
    with pytest.raises(EngineError, match=r"another engine has put its weights.*'headrace/other.1/7.3'"):
        await engine.generate(ask("t/0/0"))


async def test_a_server_that_was_left_paused_is_resumed(make: Make, vllm_client: CompletionsClient) -> None:
    await vllm_client.pause()
    done = await (await make()).generate(ask("t/0/0"))
    assert apart(done, small_llama(1)) < BOUND


async def test_requests_whose_connections_break_are_asked_again(make: Make, vllm_server: VllmServer) -> None:
    async with FaultyProxy(vllm_server.url) as proxy:
        engine = await make(proxy.url)
        calls = [asyncio.create_task(engine.generate(ask(f"t/{at}/0", max_new_tokens=100))) for at in range(6)]
        await sampling(engine, "u/0/0")
        proxy.cut()
        for done in await asyncio.gather(*calls):
            assert (len(done.token_ids_N), done.finish_reason) == (100, "length")
            assert apart(done, small_llama(1)) < BOUND
