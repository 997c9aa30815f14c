"""Servers that fail, hang, restart or are taken: found out, their requests go elsewhere, their weights are verified."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from headrace.errors import EngineError
from headrace.version import PolicyVersion
from producers.engines.api import Completion
from producers.engines.remote.buffers import Buffers
from producers.engines.remote.options import parsed
from producers.engines.remote.staged import Staged
from producers.engines.sglang.client import SglangClient
from producers.engines.sglang.engine import SglangEngine
from producers.engines.sglang.launch import Server
from producers.engines.sglang.options import Options
from tests.remote_engines import FIRST, SECOND, apart, ask, letters, stage
from tests.server_proxy import FaultyProxy
from tests.sglang_servers import decodes
from tests.support import wait_until
from tests.tiny import tiny_llama

Make = Callable[..., Awaitable[SglangEngine]]


@pytest_asyncio.fixture
async def proxy(sglang_server: Server) -> AsyncIterator[FaultyProxy]:
    async with FaultyProxy(sglang_server.url) as proxy:
        yield proxy


@pytest_asyncio.fixture
async def make(sglang_model: Path) -> AsyncIterator[Make]:
    """Engines at these URLs, on the weights of seed 1 as version 1.0."""
    made: list[SglangEngine] = []

    async def build(*urls: str, **changes: object) -> SglangEngine:
        options = parsed(Options, {"urls": list(urls), "poll_s": 0.1, "hang_s": 5.0, "outage_s": 60.0, **changes})
        engine = SglangEngine(sglang_model, options, slots=8, context_length=200, seed=3, decode=letters)
        made.append(engine)
        await engine.start()
        stage(engine, tiny_llama(1))
        await engine.commit(FIRST)
        return engine

    yield build
    for engine in made:
        await engine.close()


def running(engine: SglangEngine, count: int = 4) -> list[asyncio.Task[Completion]]:
    return [asyncio.create_task(engine.generate(ask(f"g{i}/0/0", max_new_tokens=100))) for i in range(count)]


async def assert_right(engine: SglangEngine, calls: list[asyncio.Task[Completion]]) -> None:
    """All came to their end, and the engine still samples from seed 1."""
    for done in [*await asyncio.gather(*calls), await engine.generate(ask("after/0/0"))]:
        assert done.finish_reason == "length"
        assert {span.version for span in done.spans} == {FIRST}
        assert apart(done, tiny_llama(1)) < 3e-4


async def test_one_answer_of_5xx_costs_nobody_else_anything(proxy: FaultyProxy, make: Make) -> None:
    engine = await make(proxy.url)
    calls = running(engine)
    await decodes(engine)
    proxy.fail = {"/generate"}
    odd = asyncio.create_task(engine.generate(ask("odd/0/0")))
    await wait_until(lambda: proxy.failed == 1, "one has failed")
    proxy.fail = set()
    await assert_right(engine, [*calls, odd])
    assert engine.replicas[0]._failures == 0


async def test_a_server_that_answers_5xx_is_reloaded_before_it_gets_more(proxy: FaultyProxy, make: Make) -> None:
    engine = await make(proxy.url)
    proxy.fail = {"/generate"}
    calls = running(engine, 8)
    await wait_until(lambda: engine.replicas[0].state == "broken", "it is found out")
    proxy.fail = set()
    await assert_right(engine, calls)
    assert engine.replicas[0]._failures >= 1


async def test_dropped_connections_lose_no_request(proxy: FaultyProxy, make: Make) -> None:
    engine = await make(proxy.url)
    calls = running(engine)
    await decodes(engine)
    proxy.drop = True
    proxy.cut()
    await wait_until(lambda: engine.replicas[0].state == "broken", "it is found out")
    assert engine.stats().busy_slots == 0
    assert engine.stats().waiting == 4
    assert engine.version == FIRST
    proxy.drop = False
    await assert_right(engine, calls)


async def test_a_server_that_hangs_is_found_out(proxy: FaultyProxy, make: Make) -> None:
    engine = await make(proxy.url)
    proxy.silent = {"/generate", "/server_info"}
    calls = running(engine)
    await wait_until(lambda: engine.replicas[0].state == "broken", "it is found out")
    assert "did not answer within 5 s" in engine.replicas[0].why
    proxy.speak()
    await assert_right(engine, calls)


async def test_a_server_that_was_restarted_is_reloaded(
    proxy: FaultyProxy, make: Make, sglang_client: SglangClient, sglang_model: Path
) -> None:
    engine = await make(proxy.url)
    calls = running(engine)
    await decodes(engine)
    proxy.restarted = True
    await wait_until(lambda: engine.replicas[0].state != "serving", "it is found out")
    await assert_right(engine, calls)
    assert "it was restarted" in engine.replicas[0].why


async def test_a_server_with_its_old_weights_is_reloaded(
    sglang_server: Server, make: Make, sglang_client: SglangClient, sglang_model: Path
) -> None:
    engine = await make(sglang_server.url)
    await sglang_client.update_weights_from_disk(
        model_path=str(sglang_model), weight_version="default", flush_cache=True
    )
    await wait_until(lambda: engine.replicas[0].state != "serving", "it is found out")
    await assert_right(engine, [])
    assert "labelled 'default' where this engine had put version 1.0" in engine.replicas[0].why


async def test_a_server_that_another_engine_has_taken_is_left_to_it(
    sglang_server: Server, make: Make, sglang_client: SglangClient
) -> None:
    engine = await make(sglang_server.url)
    await sglang_client.update_weight_version("headrace/other.1/7.3")
    await wait_until(lambda: engine.replicas[0].state == "lost", "it is found out")
    with pytest.raises(EngineError, match=r"no SGLang server is left .* labelled 'headrace/other.1/7.3'"):
        await engine.generate(ask("late"))
    assert (await sglang_client.model_info())["weight_version"] == "headrace/other.1/7.3"


async def test_a_server_in_use_by_another_engine_is_refused(sglang_server: Server, make: Make) -> None:
    engine = await make(sglang_server.url)
    stopping = False

    async def busy(tokens: int) -> None:
        while not stopping:
            await engine.generate(ask("busy/0/0", max_new_tokens=tokens))

    busy_calls = [asyncio.create_task(busy(100 + 5 * number)) for number in range(8)]
    await decodes(engine)
    try:
        with pytest.raises(EngineError, match="is in use"):
            await make(sglang_server.url)
    finally:
        stopping = True
        await asyncio.gather(*busy_calls)


async def test_an_update_that_touched_nothing_leaves_the_server_at_work(proxy: FaultyProxy, make: Make) -> None:
    engine = await make(proxy.url)
    calls = running(engine)
    await decodes(engine)
    proxy.fail = {"/pause_generation"}
    stage(engine, tiny_llama(2))
    assert await engine.commit(SECOND) == 0.0
    assert (engine.replicas[0].state, engine.version) == ("serving", FIRST)
    proxy.fail = set()
    await assert_right(engine, calls)
    stage(engine, tiny_llama(2))
    assert await engine.commit(SECOND) > 0.0
    done = await engine.generate(ask("t/0/0"))
    assert [span.version for span in done.spans] == [SECOND]
    assert engine.replicas[0]._failures == 0


async def test_an_incomplete_version_is_never_sampled_from(
    sglang_server: Server, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor has another name: the server answers success, and has it from the version before."""
    engine = await make(sglang_server.url)
    spoilt: list[Staged] = []
    turn = Buffers.turn

    async def spoil(buffers: Buffers, version: PolicyVersion) -> Staged | None:
        staged = await turn(buffers, version)
        assert staged is not None
        data = staged.file.read_bytes()
        assert data.count(b'"model.norm.weight"') == 1
        with staged.file.open("r+b") as file:
            file.seek(data.index(b'"model.norm.weight"'))
            file.write(b'"model.xorm.weight"')
        spoilt.append(staged)
        return staged

    monkeypatch.setattr(Buffers, "turn", spoil)
    model = tiny_llama(2)
    model.get_parameter("model.norm.weight").data += 0.5
    stage(engine, model)
    await engine.commit(SECOND)
    assert engine.replicas[0].state == "broken"
    assert "norm" in engine.replicas[0].why
    call = asyncio.create_task(engine.generate(ask("t/0/0")))
    await wait_until(lambda: engine.replicas[0]._failures >= 2, "a reload has failed, too")
    assert not call.done()
    spoilt[0].seal(SECOND)
    done = await call
    assert [span.version for span in done.spans] == [SECOND]
    assert apart(done, model) < 3e-4
