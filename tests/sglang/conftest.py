"""One real SGLang server for all tests here, which run by `make test-sglang` only: it takes half a minute to start."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import pytest
import pytest_asyncio

from producers.engines.sglang.client import SglangClient
from producers.engines.sglang.engine import KEY_VARIABLE
from producers.engines.sglang.launch import Server
from tests.sglang_servers import There, tiny_spec
from tests.tiny import save_tiny_llama

collect_ignore_glob = [] if os.environ.get("HEADRACE_TEST_SGLANG") == "1" else ["test_*.py"]


@pytest.fixture(scope="session")
def sglang_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model that the server starts with; tests do not change it."""
    return save_tiny_llama(tmp_path_factory.mktemp("sglang-model"))


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory: pytest.TempPathFactory, sglang_model: Path) -> Iterator[Server]:
    """The session's server, with its key in the environment. Tests leave it running, not paused; what weights and label
    it has is each test's to set."""
    if there := os.environ.get("HEADRACE_TEST_SGLANG_AT"):
        server = cast("Server", There(*there.split()))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(KEY_VARIABLE, server.admin_key)
            yield server
        return
    server = Server(tiny_spec(sglang_model, logs=tmp_path_factory.mktemp("sglang-logs")), "sglang")

    async def ready() -> None:
        async with SglangClient(server.url, server.admin_key) as client:
            await server.ready(client)

    try:
        asyncio.run(ready())
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(KEY_VARIABLE, server.admin_key)
            yield server
    finally:
        server.kill()


@pytest_asyncio.fixture
async def sglang_client(sglang_server: Server) -> AsyncIterator[SglangClient]:
    async with SglangClient(sglang_server.url, sglang_server.admin_key) as client:
        yield client
