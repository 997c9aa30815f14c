"""The engine "openai" at servers whose weights it updates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from headrace.errors import EngineError
from producers.engines.openai.engine import OpenAIEngine
from producers.engines.openai.options import Options
from producers.engines.remote.options import parsed
from tests.remote_engines import FIRST, SECOND, ask, spans_of
from tests.support import wait_until
from tests.updated_server import UpdatedServer
from weightsync.arena import FOLDER_VARIABLE
from weightsync.manifest import Layout

LAYOUT = Layout.of([("model.norm.weight", "float32", (4,)), ("model.embed_tokens.weight", "float32", (8, 4))])
PROMPT = (4, 5, 6)
Make = Callable[..., Awaitable[OpenAIEngine]]


@pytest_asyncio.fixture
async def server() -> AsyncIterator[UpdatedServer]:
    async with UpdatedServer(weights={spec.name: bytes(spec.nbytes) for spec in LAYOUT.tensors}) as server:
        yield server


@pytest_asyncio.fixture
async def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    """Started engines, on the weights of seed 1 as version 1.0."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 8}')
    made: list[OpenAIEngine] = []

    async def build(server: UpdatedServer, layout: Layout = LAYOUT, **changes: object) -> OpenAIEngine:
        given = {"urls": [server.url], "poll_s": 0.05, "hang_s": 5.0, **changes}
        engine = OpenAIEngine(model, parsed(Options, given), slots=8, context_length=64)
        made.append(engine)
        await engine.start()
        fill(engine, 1, layout)
        await engine.commit(FIRST)
        return engine

    yield build
    for engine in made:
        await engine.close()


def fill(engine: OpenAIEngine, seed: int, layout: Layout = LAYOUT) -> None:
    """The next version."""
    engine.back_buffer(layout)[:] = bytes_of(seed, layout)


def bytes_of(seed: int, layout: Layout = LAYOUT) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, layout.nbytes, np.uint8)


def has(server: UpdatedServer, seed: int) -> bool:
    """All of that version."""
    right = bytes_of(seed)
    return all(server.weights[spec.name] == right[spec.offset : spec.end].tobytes() for spec in LAYOUT.tensors)


async def under_way(engine: OpenAIEngine, server: UpdatedServer) -> asyncio.Task[object]:
    """A request for five tokens that the server does not answer until it is paused."""
    server.hang = True
    call = asyncio.create_task(engine.generate(ask("t/0/0", PROMPT, max_new_tokens=5)))
    await wait_until(lambda: server.open == 1, "it is there")
    return call


async def test_what_is_under_way_goes_on_under_the_new_version(server: UpdatedServer, make: Make) -> None:
    engine = await make(server)
    assert has(server, 1)
    call = await under_way(engine, server)
    server.told.clear()
    fill(engine, 2)
    assert await engine.commit(SECOND) > 0.0
    done = await call
    assert spans_of(done) == [(0, 2, FIRST, "fresh"), (2, 5, SECOND, "fresh")]  # type: ignore[arg-type]
    assert has(server, 2)
    assert server.label.endswith("/1.1")
    order = ["/pause", "/collective_rpc", "/weight_checker", "/update_weight_version", "/resume"]
    assert server.told == order
    salts = {body.get("cache_salt") for body in server.asked if body["prompt"][:3] == list(PROMPT)}
    assert len(salts) == 2


async def test_an_update_that_is_refused_before_the_load_leaves_the_server_at_work(
    server: UpdatedServer, make: Make
) -> None:
    engine = await make(server)
    call = await under_way(engine, server)
    server.refuse = {"/pause"}
    fill(engine, 2)
    assert await engine.commit(SECOND) == 0.0
    assert (engine.version, engine.replicas[0].state, server.paused) == (FIRST, "serving", False)
    assert not call.done()
    server.refuse = set()
    fill(engine, 2)
    assert await engine.commit(SECOND) > 0.0
    assert [span[2] for span in spans_of(await call)] == [FIRST, SECOND]  # type: ignore[arg-type]
    assert engine.replicas[0]._failures == 0


async def test_a_server_that_says_that_it_has_what_it_has_not_samples_nothing_until_it_is_mended(
    server: UpdatedServer, make: Make
) -> None:
    engine = await make(server)
    server.without = {"model.norm.weight"}
    fill(engine, 2)
    await engine.commit(SECOND)
    replica = engine.replicas[0]
    assert (replica.state, server.paused) == ("broken", True)
    assert "1 of 2 tensors have other checksums than the staged ones: model.norm.weight" in replica.why
    call = asyncio.create_task(engine.generate(ask("t/0/0", PROMPT, max_new_tokens=5)))
    server.without = set()
    assert spans_of(await call) == [(0, 5, SECOND, "fresh")]
    assert has(server, 2)
    assert not server.paused


async def test_a_load_that_fails_is_half_way(server: UpdatedServer, make: Make) -> None:
    engine = await make(server)
    server.refuse = {"/collective_rpc"}
    fill(engine, 2)
    await engine.commit(SECOND)
    assert (engine.replicas[0].state, server.paused) == ("broken", True)
    assert "no /collective_rpc today" in engine.replicas[0].why
    server.refuse = set()
    await wait_until(lambda: engine.replicas[0].takes, "it was reloaded")
    assert has(server, 2)
    assert not server.paused


async def test_another_model_is_refused_before_anything_is_loaded(server: UpdatedServer, make: Make) -> None:
    other = Layout.of([("model.norm.weight", "float32", (4,)), ("model.other.weight", "float32", (8, 4))])
    with pytest.raises(EngineError, match=r"has nothing for 1 of the server's tensors .model.embed_tokens.weight"):
        await make(server, other, restarts=0)
    assert "/pause" not in server.told
