"""Fixtures of tests that look at how a service waits and is woken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import redis

from broker.api import RunRecord
from broker.connect import Run, connect_run
from headrace.config import BrokerConfig
from tests.conftest import Services


@pytest.fixture
async def patient(service: Services, broker_url: str, record: RunRecord) -> AsyncIterator[Run]:
    """A service whose reads wait a minute: it answers within a test only when it is woken."""
    run = connect_run(broker_url, record.run_id, BrokerConfig(stream_block_ms=60_000))
    yield run
    await run.close()


@pytest.fixture
def somebody_waits(broker_url: str) -> Callable[[], Awaitable[bool]]:
    """Whether a read waits at the broker."""

    async def in_memory() -> bool:
        # Nothing there takes time but the waiting itself.
        await asyncio.sleep(0)
        return True

    async def on_redis() -> bool:
        with redis.Redis.from_url(broker_url) as client:
            return bool(client.info("clients")["blocked_clients"])

    return in_memory if broker_url.startswith("memory:") else on_redis
