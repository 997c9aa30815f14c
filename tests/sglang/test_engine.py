"""The engine on the real server: ids, log-probs, versions and ends as the server has them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from headrace.errors import EngineError
from producers.engines.remote.options import parsed
from producers.engines.sglang.engine import SglangEngine
from producers.engines.sglang.launch import Server
from producers.engines.sglang.options import Options
from tests.remote_engines import FIRST, PROMPT, SECOND, apart, ask, scored, spans_of, stage
from tests.sglang_servers import decodes, engine_at
from tests.support import wait_until
from tests.tiny import tiny_llama


@pytest_asyncio.fixture
async def engine(sglang_server: Server, sglang_model: Path) -> AsyncIterator[SglangEngine]:
    """On the weights of seed 1, as version 1.0."""
    made = engine_at(sglang_server.url, sglang_model)
    await made.start()
    stage(made, tiny_llama(1))
    await made.commit(FIRST)
    yield made
    await made.close()


async def test_tokens_come_with_the_log_probs_of_the_model_that_was_committed(engine: SglangEngine) -> None:
    done = await engine.generate(ask("t/0/0"))
    assert (len(done.token_ids_N), done.finish_reason) == (12, "length")
    assert done.token_ids_N.dtype == np.int32
    assert done.logprobs_N.dtype == np.float32
    assert spans_of(done) == [(0, 12, FIRST, "fresh")]
    assert apart(done, tiny_llama(1)) < 2e-4


@pytest.mark.parametrize("temperature", [0.5, 2.0])
async def test_log_probs_are_those_at_the_temperature(engine: SglangEngine, temperature: float) -> None:
    done = await engine.generate(ask("t/0/0", temperature=temperature))
    assert apart(done, tiny_llama(1), temperature=temperature) < 2e-4


async def test_greedy_log_probs_are_those_of_temperature_one(engine: SglangEngine) -> None:
    done, other = await asyncio.gather(
        engine.generate(ask("t/0/0", temperature=0.0)), engine.generate(ask("t/1/0", temperature=1.5))
    )
    assert apart(done, tiny_llama(1)) < 2e-4
    assert apart(other, tiny_llama(1), temperature=1.5) < 2e-4


async def test_log_probs_are_those_after_top_k_and_top_p(engine: SglangEngine) -> None:
    done = await engine.generate(ask("t/0/0", top_k=5, top_p=0.9, max_new_tokens=30))
    model, tokens = tiny_llama(1), done.token_ids_N.tolist()
    plain = scored(model, PROMPT, tokens)
    for place, token in enumerate(tokens):
        before = (*PROMPT, *tokens[:place])
        every = np.exp([scored(model, before, [candidate])[0] for candidate in range(258)])
        order = np.argsort(-every)
        ranked = every[order]
        kept = (np.arange(258) < 5) & (np.cumsum(ranked) - ranked <= 0.9)
        rank = int(np.flatnonzero(order == token)[0])
        assert kept[rank]
        assert abs(done.logprobs_N[place] - np.log(ranked[rank] / ranked[kept].sum())) < 1e-3
        if place == 3:
            break
    assert (done.logprobs_N > plain).all()


async def test_what_cannot_be_sampled_with_its_log_probs_is_refused(engine: SglangEngine) -> None:
    with pytest.raises(EngineError, match=r"top_p = 0.9 without sampling.top_k"):
        await engine.generate(ask("t/0/0", top_p=0.9))


async def test_a_token_beyond_the_vocabulary_never_reaches_the_server(engine: SglangEngine) -> None:
    with pytest.raises(EngineError, match="token 258, beyond the model's vocabulary of 258"):
        await engine.generate(ask("t/0/0", prompt=(1, 258)))
    assert len((await engine.generate(ask("t/0/1"))).token_ids_N) == 12


async def test_a_stop_token_ends_and_is_included(engine: SglangEngine) -> None:
    free = await engine.generate(ask("a", temperature=0.0))
    stop = int(free.token_ids_N[4])
    first = free.token_ids_N.tolist().index(stop)
    done = await engine.generate(ask("b", temperature=0.0, stop_token_ids=(stop,)))
    assert done.finish_reason == "stop"
    assert done.token_ids_N.tolist() == free.token_ids_N.tolist()[: first + 1]


async def test_the_end_token_of_the_model_is_no_stop_token_of_ours(engine: SglangEngine) -> None:
    """The server stops at the tokenizer's own end token, 257 here, whatever it was told."""
    model = tiny_llama(1)
    greedy = (await engine.generate(ask("a", temperature=0.0, max_new_tokens=3))).token_ids_N.tolist()
    embedding = model.get_input_embeddings().weight.data
    embedding[257] = embedding[greedy[1]] * 4  # tied: its logit is now the largest after the first token
    stage(engine, model)
    await engine.commit(SECOND)
    done = await engine.generate(ask("b", temperature=0.0, stop_token_ids=(5,), max_new_tokens=20))
    tokens = done.token_ids_N.tolist()
    assert 257 in tokens[:-1]
    assert engine.stats().recomputed_tokens > 0  # it went on in a request of its own
    assert (len(tokens), done.finish_reason) == (20, "length")
    assert [span.version for span in done.spans] == [SECOND]
    assert apart(done, model) < 2e-4


async def test_the_context_is_a_limit(engine: SglangEngine) -> None:
    assert engine.context_length == 200
    done = await engine.generate(ask("a", prompt=tuple(range(100)) + tuple(range(97)), max_new_tokens=50))
    assert (len(done.token_ids_N), done.finish_reason) == (3, "length")
    full = await engine.generate(ask("b", prompt=(7,) * 200))
    assert (len(full.token_ids_N), full.finish_reason, full.spans) == (0, "length", ())


async def test_the_context_is_also_the_servers(sglang_server: Server, sglang_model: Path) -> None:
    made = SglangEngine(sglang_model, parsed(Options, {"urls": [sglang_server.url]}), slots=2, context_length=4096)
    await made.start()
    await made.commit(FIRST)
    assert 480 < made.context_length < 512
    prompt = (7,) * (made.context_length - 1)
    done = await made.generate(ask("a", prompt=prompt, max_new_tokens=50))
    assert (len(done.token_ids_N), done.finish_reason) == (1, "length")
    await made.close()


async def test_abort_returns_what_there_is(engine: SglangEngine) -> None:
    running = [asyncio.create_task(engine.generate(ask(f"r{i}", max_new_tokens=150))) for i in range(8)]
    waiting = asyncio.create_task(engine.generate(ask("w", max_new_tokens=150)))
    await wait_until(lambda: engine.stats().busy_slots == 8, "all slots are busy")
    await wait_until(lambda: (engine.replicas[0].load or engine.replicas[0]).running == 8, "the server runs them")
    engine.abort("w")
    engine.abort("r0")
    engine.abort("nobody")
    aborted, never, *rest = await asyncio.gather(running[0], waiting, *running[1:])
    assert aborted.finish_reason == never.finish_reason == "abort"
    assert 0 < len(aborted.token_ids_N) < 150
    assert aborted.spans[-1].end == len(aborted.token_ids_N) == len(aborted.logprobs_N)
    assert (len(never.token_ids_N), never.spans) == (0, ())
    assert [len(one.token_ids_N) for one in rest] == [150] * 7


async def test_a_cancelled_generate_frees_its_slot(engine: SglangEngine) -> None:
    tasks = [asyncio.create_task(engine.generate(ask(f"r{i}", max_new_tokens=150))) for i in range(9)]
    await wait_until(lambda: engine.stats().busy_slots == 8, "all slots busy")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await wait_until(lambda: engine.stats().busy_slots == engine.stats().waiting == 0, "slots free again")

    async def idle() -> bool:
        load = (await engine.replicas[0].client.loads()).total()
        return load.running + load.queued == 0

    await wait_until(idle, "the server has none of them")


async def test_a_commit_in_the_middle_splits_the_spans(engine: SglangEngine) -> None:
    running = asyncio.create_task(engine.generate(ask("a", max_new_tokens=150)))
    await decodes(engine)
    stage(engine, tiny_llama(2))
    still = await engine.commit(SECOND)
    assert still > 0
    assert engine.version == SECOND
    new = await engine.generate(ask("b"))
    done = await running
    assert [(span.version, span.kv) for span in done.spans] == [(FIRST, "fresh"), (SECOND, "kept")]
    split = done.spans[0].end
    assert 0 < split == done.spans[1].start < done.spans[1].end == 150
    tokens = done.token_ids_N.tolist()
    assert np.abs(done.logprobs_N[:split] - scored(tiny_llama(1), PROMPT, tokens)[:split]).max() < 2e-4
    assert np.abs(done.logprobs_N[split:] - scored(tiny_llama(2), PROMPT, tokens)[split:]).max() > 1e-3
    # The same prompt: what the old policy left in the cache is not read.
    assert spans_of(new) == [(0, 12, SECOND, "fresh")]
    assert apart(new, tiny_llama(2)) < 2e-4


async def test_open_requests_tell_how_far_they_are(engine: SglangEngine) -> None:
    running = [asyncio.create_task(engine.generate(ask(f"r{i}", max_new_tokens=150))) for i in range(9)]
    await wait_until(lambda: engine.stats().waiting == 1, "one waits")
    first, last = engine.progress("r0"), engine.progress("r8")
    assert first is not None
    assert last is not None
    assert (first.oldest, last.oldest, last.sampled) == (FIRST, None, 0)
    assert engine.progress("nobody") is None
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert engine.progress("r0") is None


async def test_close_ends_everything_with_abort(engine: SglangEngine) -> None:
    tasks = [asyncio.create_task(engine.generate(ask(f"r{i}", max_new_tokens=150))) for i in range(10)]
    await wait_until(lambda: engine.stats().busy_slots == 8, "all slots busy")
    await engine.close()
    await engine.close()
    assert {done.finish_reason for done in await asyncio.gather(*tasks)} == {"abort"}
    with pytest.raises(EngineError):
        await engine.generate(ask("late"))


async def test_nothing_is_sampled_before_a_version_is_there(sglang_server: Server, sglang_model: Path) -> None:
    made = engine_at(sglang_server.url, sglang_model)
    await made.start()
    assert made.version is None
    with pytest.raises(EngineError, match="no policy version"):
        await made.generate(ask("a"))
    await made.close()
