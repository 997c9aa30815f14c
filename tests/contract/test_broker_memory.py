"""What a broker says of its own memory."""

from __future__ import annotations

from collections.abc import Callable

from broker.api import RunRecord
from broker.connect import connect_run
from tests.conftest import BROKER, Services
from tests.servers import RedisProcess


async def test_redis_says_what_it_uses_and_its_limit(
    redis_process: Callable[..., RedisProcess], record: RunRecord
) -> None:
    run = connect_run(redis_process("--maxmemory", "64mb").url, record.run_id, BROKER)
    used, limit = await run.memory()
    assert 0 < used < limit == 64 << 20
    await run.close()


async def test_without_a_limit_it_is_0(service: Services) -> None:
    _, limit = await service().memory()
    assert limit == 0
