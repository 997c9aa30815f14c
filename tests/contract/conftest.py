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
from tests.servers import KINDS, RedisProcess


@pytest.fixture(params=KINDS)
def redis_kind(request: pytest.FixtureRequest) -> str:
    """What is about Redis holds for every server that is supported."""
    return str(request.param)


@pytest.fixture
async def patient(service: Services, broker_url: str, record: RunRecord) -> AsyncIterator[Run]:
    """A service whose reads wait a minute: it answers within a test only when it is woken."""
    run = connect_run(broker_url, record.run_id, BrokerConfig(stream_block_ms=60_000))
    yield run
    await run.close()


@pytest.fixture
def somebody_waits(broker_server: RedisProcess | None) -> Callable[[], Awaitable[bool]]:
    """Whether a read waits at the broker."""

    async def in_memory() -> bool:
        # Nothing there takes time but the waiting itself.
        await asyncio.sleep(0)
        return True

    async def on_redis() -> bool:
        assert broker_server is not None
        with redis.Redis.from_url(broker_server.admin_url) as client:
            return bool(client.info("clients")["blocked_clients"])

    return in_memory if broker_server is None else on_redis
