"""Real vLLM servers, for tests that run by `make test-vllm` only: one takes a minute to start."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from producers.engines.openai.client import CompletionsClient
from tests.vllm_servers import VllmServer, save_small_llama

collect_ignore_glob = [] if os.environ.get("HEADRACE_TEST_VLLM") == "1" else ["test_*.py"]


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the small model that the server starts with; tests do not change it."""
    return save_small_llama(tmp_path_factory.mktemp("vllm-model"))


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory, vllm_model: Path) -> Iterator[VllmServer]:
    """The session's server. Tests leave it running; what weights and label it has is each test's to set."""
    log = tmp_path_factory.mktemp("vllm-logs") / "vllm.log"
    server = VllmServer(vllm_model, log, "--logprobs-mode", "processed_logprobs")
    try:
        asyncio.run(server.ready())
        yield server
    finally:
        server.kill()


@pytest_asyncio.fixture
async def vllm_client(vllm_server: VllmServer) -> AsyncIterator[CompletionsClient]:
    async with CompletionsClient(vllm_server.url) as client:
        yield client
