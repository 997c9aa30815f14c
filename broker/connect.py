"""From a URL to a broker: the only place that knows which kinds there are.

The URL carries user, password and TLS, as in `rediss://user:password@host:6380/0`; it comes from the environment or a
private file, never from a command line. `memory:` is this process's own broker, for tests and capacity planning.
"""

from __future__ import annotations

from typing import Protocol

from broker.api import OperatorPort, ProducerPort, RunRecord, Runs, TrainerPort, WeightsPort
from headrace.config import BrokerConfig, Config
from headrace.config_sources import stored

MEMORY = "memory:"


class Run(ProducerPort, TrainerPort, WeightsPort, OperatorPort, Protocol):
    """One run with every port."""


def connect_runs(url: str, config: BrokerConfig | None = None) -> Runs:
    """All runs of the broker at `url`. Nothing is sent before the first call.

    Raises ConfigError for a URL that is none.
    """
    config = config or BrokerConfig()
    if url.startswith(MEMORY):
        from broker.memory import MemoryRuns

        return MemoryRuns(url)
    from broker.redis.connection import Connection
    from broker.redis.runs import RedisRuns

    return RedisRuns(Connection(url, config))


def connect_run(url: str, run_id: str, config: BrokerConfig | None = None) -> Run:
    """One run of the broker at `url`. Nothing is sent before the first call.

    Raises ConfigError for a URL that is none, Refused for an id that no run can have.
    """
    config = config or BrokerConfig()
    if url.startswith(MEMORY):
        from broker.memory import MemoryRuns

        return MemoryRuns(url).run(run_id, config.max_deliveries)
    from broker.redis.run import RedisRun

    return RedisRun(url, run_id, config)


async def open_run(url: str, run_id: str) -> tuple[RunRecord, Config, Run]:
    """What a service needs that was told only the URL and the run's id: the record, read with the default waits, its
    configuration, and the run on the waits that stand there.

    Raises BrokerUnavailable, Refused for a run that is not there, ConfigError for a record of another release.
    """
    asking = connect_run(url, run_id)
    try:
        record = await asking.record()
    finally:
        await asking.close()
    config = stored(record.config)
    run = connect_run(url, run_id, config.broker)
    # A run that this connection has seen may come back when Redis loses it; one that it has not is refused.
    await run.record()
    return record, config, run
