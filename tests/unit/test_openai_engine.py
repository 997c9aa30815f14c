"""The engine "openai" at servers whose weights it cannot update: for evaluation and generation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from headrace.errors import ConfigError, EngineError, WeightError
from headrace.version import PolicyVersion
from producers.engines.api import Request, SamplingParams
from producers.engines.openai.engine import OpenAIEngine
from producers.engines.openai.options import Options
from producers.engines.remote.options import parsed
from tests.completion_server import CompletionServer, Lacks
from tests.support import wait_until
from weightsync.manifest import Layout

FIRST, SECOND = PolicyVersion(1, 0), PolicyVersion(1, 1)
Make = Callable[..., Awaitable[OpenAIEngine]]


def ask(name: str = "t/0/0", **sampling: object) -> Request:
    params = SamplingParams(**{"max_new_tokens": 5, **sampling})  # type: ignore[arg-type]
    return Request(name, np.array([4, 5, 6], np.int32), params)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    return tmp_path


@pytest_asyncio.fixture
async def make(folder: Path) -> AsyncIterator[Make]:
    """Started engines, with the servers' weights as version 1.0."""
    made: list[OpenAIEngine] = []

    async def build(
        *servers: CompletionServer, sampling: SamplingParams | None = None, **changes: object
    ) -> OpenAIEngine:
        given = {"urls": [one.url for one in servers], "updates": "none", "poll_s": 0.05, "hang_s": 0.5, **changes}
        engine = OpenAIEngine(folder, parsed(Options, given), slots=8, context_length=512, sampling=sampling)
        made.append(engine)
        await engine.start()
        await engine.commit(FIRST)
        return engine

    yield build
    for engine in made:
        await engine.close()


async def test_ids_log_probs_and_the_version_come_as_the_server_has_them(make: Make) -> None:
    async with CompletionServer() as server:
        engine = await make(server)
        assert engine.context_length == 64
        done = await engine.generate(ask())
    assert done.token_ids_N.tolist() == [3, 4, 5, 6, 7]
    assert np.allclose(done.logprobs_N, 1.5 - np.log(np.exp(1.5) + 7))
    assert [tuple(span) for span in done.spans] == [(0, 5, FIRST, "fresh")]
    assert done.finish_reason == "length"


async def test_the_devices_of_all_servers_are_one_lane_whose_split_is_estimated(make: Make) -> None:
    async with CompletionServer() as one, CompletionServer() as two:
        engine = await make(one, two, devices=4)
        place = engine.lane.place
        assert (place.kind, place.devices, place.estimated) == ("device", 8, True)
        await engine.generate(ask())
        await wait_until(lambda: engine.lane.phase == "wait_start", "it has nothing to do")
        engine.lane.because("no_task")
        assert engine.lane.phase == "wait_no_task"
        assert engine.lane.seconds()["decode"] > 0
        for number in range(20):
            await engine.generate(ask(f"t/{number}/0"))
        await asyncio.gather(*(engine.generate(ask(f"u/{number}/0")) for number in range(8)))
        # What requests cost is known by now: prompts have a part of it, or none where it cannot be told apart.
        engine._split(8)
        assert sum(share for _, share in engine._shares) == pytest.approx(1.0)
        assert engine._counted.decoded >= 64


async def test_it_ends_with_the_first_stop_token(make: Make) -> None:
    async with CompletionServer() as server:
        done = await (await make(server)).generate(ask(stop_token_ids=(5,)))
    assert (done.token_ids_N.tolist(), done.finish_reason) == ([3, 4, 5], "stop")


async def test_a_server_that_is_not_updated_never_has_another_version(make: Make) -> None:
    async with CompletionServer() as server:
        engine = await make(server)
        with pytest.raises(WeightError, match=r'updates = "none".*for evaluation and generation alone'):
            engine.back_buffer(Layout.of([("w", "float32", (2, 2))]))
        with pytest.raises(WeightError, match='updates = "none"'):
            await engine.commit(SECOND)
        assert await engine.commit(FIRST) == 0.0
        assert engine.version == FIRST
        assert (await engine.generate(ask())).spans[0].version == FIRST


async def test_a_server_without_routes_for_updates_is_refused_with_the_way_out(make: Make) -> None:
    async with CompletionServer(paths=("/v1/completions", "/pause", "/resume")) as server:
        with pytest.raises(EngineError, match=r"has no /collective_rpc, /is_paused.*DEV_MODE=1.*updates = "):
            await make(server, updates="auto")


async def test_what_is_missing_ends_the_start(make: Make) -> None:
    async with CompletionServer(Lacks(ids=True)) as server:
        with pytest.raises(EngineError, match=r"cannot be used: .*returns no token ids"):
            await make(server)


async def test_sampling_that_a_server_tells_no_log_probs_of_is_refused_at_start_and_later(make: Make) -> None:
    async with CompletionServer(Lacks(raw=True)) as server:
        with pytest.raises(EngineError, match=r"temperature 0\.5: .*processed_logprobs"):
            await make(server, sampling=SamplingParams(5, temperature=0.5))
        engine = await make(server, sampling=SamplingParams(5))
        with pytest.raises(EngineError, match="top_k 3"):
            await engine.generate(ask(top_k=3))


async def test_the_key_comes_from_the_environment_alone(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with CompletionServer(key="secret") as server:
        with pytest.raises(ConfigError, match="api_key_env = 'A_KEY': this variable is not set, nor is A_KEY_FILE"):
            await make(server, api_key_env="A_KEY")
        monkeypatch.setenv("A_KEY", "wrong")
        with pytest.raises(EngineError, match="wrong key"):
            await make(server, api_key_env="A_KEY")
        monkeypatch.setenv("A_KEY", "secret")
        assert (await (await make(server, api_key_env="A_KEY")).generate(ask())).finish_reason == "length"
        monkeypatch.delenv("A_KEY")
        monkeypatch.setenv("A_KEY_FILE", str(tmp_path / "key"))
        (tmp_path / "key").write_text("secret\n")
        assert (await (await make(server, api_key_env="A_KEY")).generate(ask())).finish_reason == "length"


@pytest.mark.parametrize("fault", ["fails", "hangs", "dies"])
async def test_what_a_server_does_not_answer_another_does(make: Make, fault: str) -> None:
    async with CompletionServer() as first, CompletionServer() as second:
        engine = await make(first, second)
        first.hang = second.hang = True
        calls = [asyncio.create_task(engine.generate(ask(f"g{at}/0/0"))) for at in range(8)]
        await wait_until(lambda: first.open > 0 and second.open > 0 and first.open + second.open == 8, "all are open")
        second.let_go()
        if fault == "fails":
            first.fail = 500
            first.let_go()
        if fault == "dies":
            await first.close()
        for done in await asyncio.gather(*calls):
            assert (done.token_ids_N.tolist(), done.finish_reason) == ([3, 4, 5, 6, 7], "length")


async def test_what_a_server_has_answered_is_kept_when_it_dies_and_what_it_has_not_is_sampled_anew(make: Make) -> None:
    async with CompletionServer() as first, CompletionServer() as second:
        engine = await make(first, second)
        for one in (first, second):
            one.asked.clear()
            one.cut, one.most = 2, 1
        call = asyncio.create_task(engine.generate(ask()))
        await wait_until(lambda: any(one.asked and one.open for one in (first, second)), "the second request is open")
        dying, other = (first, second) if first.asked else (second, first)
        other.cut = other.most = None
        await dying.close()
        done = await call
    assert [body["prompt"] for body in dying.asked] == [[4, 5, 6]]
    assert [(body["prompt"], body["max_tokens"]) for body in other.asked] == [([4, 5, 6, 3, 4], 3)]
    assert (done.token_ids_N.tolist(), done.finish_reason) == ([3, 4, 5, 6, 7], "length")
    assert [tuple(span) for span in done.spans] == [(0, 5, FIRST, "fresh")]


async def test_a_request_that_a_server_refuses_ends_with_the_servers_words(make: Make) -> None:
    async with CompletionServer() as server:
        engine = await make(server)
        server.fail = 400
        done = await engine.generate(ask())
        assert (done.finish_reason, done.why) == ("abort", f"server {server.url} refused it: out of order")
        assert engine.replicas[0].state == "serving"


async def test_a_server_that_refuses_whatever_it_is_asked_is_broken_and_no_request_of_it_is_lost(make: Make) -> None:
    async with CompletionServer() as server:
        engine = await make(server)
        server.key = "another one now"
        calls = [asyncio.create_task(engine.generate(ask(f"g{at}/0/0"))) for at in range(3)]
        await wait_until(lambda: engine.replicas[0].state == "broken", "it is broken")
        assert "wrong key" in engine.replicas[0].why
        server.key = ""
        for done in await asyncio.gather(*calls):
            assert (done.token_ids_N.tolist(), done.why) == ([3, 4, 5, 6, 7], "")


async def test_a_request_that_comes_to_nothing_again_and_again_ends_with_what_was_last_said(make: Make) -> None:
    async with CompletionServer() as server:
        engine = await make(server)
        server.cut = 0
        done = await engine.generate(ask())
        assert done.finish_reason == "abort"
        assert done.why == (
            f"4 requests came to nothing, the last one so: server {server.url} ended it without a token (abort)"
        )


async def test_a_token_that_the_model_has_not_is_no_answer(make: Make, folder: Path) -> None:
    (folder / "config.json").write_text('{"vocab_size": 7}')
    async with CompletionServer() as server:
        engine = await make(server)
        done = await engine.generate(ask())
    assert (done.finish_reason, len(done.token_ids_N)) == ("abort", 0)
    assert "has token 7, which is not in the model's vocabulary of 7" in done.why


async def test_a_server_that_is_away_is_taken_back(make: Make) -> None:
    async with CompletionServer() as server:
        engine = await make(server)
        server.fail = 503
        call = asyncio.create_task(engine.generate(ask()))
        await wait_until(lambda: engine.replicas[0].state == "broken", "it is broken")
        server.fail = 0
        assert (await call).finish_reason in ("length", "abort")
        await wait_until(lambda: engine.replicas[0].state == "serving", "it serves again")
        assert (await engine.generate(ask("u/0/0"))).token_ids_N.tolist() == [3, 4, 5, 6, 7]


async def test_when_no_server_is_left_requests_fail_with_the_reasons(make: Make) -> None:
    async with CompletionServer() as server:
        engine = await make(server, outage_s=0.2)
        server.hang = True
        call = asyncio.create_task(engine.generate(ask()))
        await wait_until(lambda: server.open > 0, "it is open")
        await server.close()
        with pytest.raises(EngineError, match=r"no OpenAI-compatible server is left .*was away for 0 s"):
            await call


async def test_an_aborted_request_ends_with_abort_and_its_server_is_told(make: Make) -> None:
    async with CompletionServer() as server:
        engine = await make(server)
        server.hang = True
        call = asyncio.create_task(engine.generate(ask()))
        await wait_until(lambda: server.open > 0, "it is open")
        engine.abort("t/0/0")
        done = await call
        assert (done.finish_reason, len(done.token_ids_N)) == ("abort", 0)
        await wait_until(lambda: server.open == 0, "the connection is closed")


def test_options_are_refused_with_their_name() -> None:
    with pytest.raises(ConfigError, match=r"engine_options\.urls"):
        parsed(Options, {})
    with pytest.raises(ConfigError, match=r"engine_options\.urls.*: a server stands twice|a server stands twice"):
        parsed(Options, {"urls": ["http://a:1", "http://a:1"]})
    with pytest.raises(ConfigError, match=r"engine_options\.updates = 'always'"):
        parsed(Options, {"urls": ["http://a:1"], "updates": "always"})
    with pytest.raises(ConfigError, match=r"engine_options\.api_key"):
        parsed(Options, {"urls": ["http://a:1"], "api_key": "secret"})
