"""The client: kinds of failure, deadlines, what is sent. Against servers of a few lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from producers.engines.remote import http
from producers.engines.sglang.client import ServerBroken, ServerGone, ServerRefused, SglangClient

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[SglangClient]]


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Serve]:
    runners: list[web.AppRunner] = []
    clients: list[SglangClient] = []

    async def start(handler: Handler) -> SglangClient:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", handler)
        runners.append(web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        clients.append(SglangClient(f"http://127.0.0.1:{runners[-1].addresses[0][1]}/", "secret"))
        return clients[-1]

    yield start
    for client in clients:
        await client.close()
    for runner in runners:
        await runner.cleanup()


def answering(body: Any, status: int = 200) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(body=body if isinstance(body, bytes) else json.dumps(body).encode(), status=status)

    return handle


@pytest.mark.parametrize(
    ("body", "status", "kind", "sentence"),
    [
        ({"error": {"message": "temperature must be non-negative"}}, 400, ServerRefused, "^temperature must be"),
        ({"success": False, "message": "no such group"}, 400, ServerRefused, "^no such group$"),
        ({"success": False, "message": "no such group"}, 200, ServerRefused, "^no such group$"),
        ({"detail": "Not Found"}, 404, ServerRefused, "^Not Found$"),
        (b"Flush cache failed.\n", 400, ServerRefused, r"^Flush cache failed\.$"),
        (b"oops", 500, ServerBroken, "failed with 500: oops"),
        ({"error": {"message": "dead"}}, 503, ServerBroken, "failed with 503: dead"),
        (b"<html>", 200, ServerBroken, "not JSON"),
        (b"[" * 100_000, 200, ServerBroken, "not JSON"),
        (b"[" * 100_000, 500, ServerBroken, r"failed with 500: \[\["),
    ],
)
async def test_failures_have_their_kind_and_the_servers_words(
    serve: Serve, body: Any, status: int, kind: type[Exception], sentence: str
) -> None:
    client = await serve(answering(body, status))
    with pytest.raises(kind, match=sentence):
        await client.begin_weight_update()


async def test_an_answer_without_tokens_is_not_understood(serve: Serve) -> None:
    client = await serve(answering({"text": "Paris"}))
    with pytest.raises(ServerBroken, match="not understood"):
        await client.generate({})


async def test_what_is_nested_too_deep_is_not_understood(serve: Serve) -> None:
    client = await serve(answering(b'{"text":' + b"[" * 100_000))
    with pytest.raises(ServerBroken, match="not understood"):
        await client.generate({})


async def test_other_json_than_an_object_is_the_servers_fault(serve: Serve) -> None:
    client = await serve(answering([1]))
    for ask in (client.openapi, client.model_info, client.server_info):
        with pytest.raises(ServerBroken, match="answered list where an object belongs"):
            await ask()


async def test_a_redirect_is_not_followed_but_said(serve: Serve) -> None:
    async def elsewhere(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect(request.path)

    client = await serve(elsewhere)
    with pytest.raises(ServerBroken, match=r"/generate redirects \(307\) to /generate; give the URL that answers"):
        await client.generate({})


async def test_a_long_message_is_cut(serve: Serve) -> None:
    client = await serve(answering(b"x" * 10_000, 500))
    with pytest.raises(ServerBroken) as caught:
        await client.continue_generation()
    assert len(str(caught.value)) < 700


async def test_an_answer_without_end_is_cut(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MOST_BYTES", 1 << 20)
    read = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal read
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * (1 << 16))
            read += 1 << 16

    client = await serve(endless)
    with pytest.raises(ServerBroken, match="/model_info answers more than 1 MB"):
        await client.model_info()
    assert read < 64 << 20


async def test_deadlines_hold(serve: Serve) -> None:
    async def hang(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    client = await serve(hang)
    with pytest.raises(ServerGone, match=r"/server_info did not answer within 0.1 s"):
        await client.server_info(timeout_s=0.1)


async def test_a_server_that_is_not_there_or_drops_is_gone(serve: Serve) -> None:
    async def drop(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    client = await serve(drop)
    with pytest.raises(ServerGone, match="cannot be reached"):
        await client.model_info()
    async with SglangClient("http://127.0.0.1:9") as nobody:
        with pytest.raises(ServerGone, match="cannot be reached"):
            await nobody.model_info()


async def test_a_closed_client_asks_nothing_more(serve: Serve) -> None:
    client = await serve(answering({}))
    await client.model_info()
    await client.close()
    with pytest.raises(ServerGone, match="closed"):
        await client.continue_generation()


async def test_running_requests_are_never_aborted_by_an_update(serve: Serve) -> None:
    """SGLang's own default is to abort them where only the label changes."""
    seen: list[tuple[str, str, Any]] = []

    async def note(request: web.Request) -> web.Response:
        seen.append((request.path_qs, request.headers["Authorization"], await request.json()))
        return web.json_response({"success": True, "message": ""})

    client = await serve(note)
    await client.update_weights_from_disk(model_path="m", weight_version="v")
    await client.update_weights_from_tensor(serialized_named_tensors=["AA"], weight_version="v")
    await client.update_weights_from_distributed(names=["w"], dtypes=["f"], shapes=[(1,)], group_name="g")
    await client.update_weight_version("v")
    await client.flush_cache(timeout_s=2.5)
    *updates, (flush, _, _) = seen
    assert all(body["abort_all_requests"] is False for _, _, body in updates)
    assert all(body["flush_cache"] is False for _, _, body in updates[:3])
    assert flush == "/flush_cache?timeout=2.5"
    assert {key for _, key, _ in seen} == {"Bearer secret"}


async def test_many_requests_are_open_at_once(serve: Serve) -> None:
    """aiohttp itself would stop at a hundred connections."""
    inside, most, all_there = 0, 0, asyncio.Event()

    async def meet(request: web.Request) -> web.Response:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if inside == 150:
            all_there.set()
        await all_there.wait()
        return web.json_response({"output_ids": [1], "meta_info": {"finish_reason": {"type": "length"}}})

    client = await serve(meet)
    answers = await asyncio.wait_for(asyncio.gather(*(client.generate({}) for _ in range(150))), 60)
    assert most == len(answers) == 150
    assert answers[0].output_ids == [1]
