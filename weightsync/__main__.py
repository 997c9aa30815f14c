"""`python -m weightsync`: the weight service of this host.

Needs only the broker's URL and the run's id: HEADRACE_REDIS_URL and HEADRACE_RUN, or flags. A URL with a password is
taken from the environment only.
"""

from __future__ import annotations

import sys
from pathlib import Path

from broker.api import RunRecord
from broker.connect import open_run
from headrace.hosts import host_name
from headrace.invocation import Invocation, run
from headrace.service import Service
from headrace.telemetry.endpoint import Endpoint
from headrace.telemetry.journal import Journal
from headrace.telemetry.metrics import Metrics
from weightsync.arena import Arena
from weightsync.between import Between
from weightsync.choosing import backends_of
from weightsync.service import WeightService

DRAIN_S = 20.0


async def start(service: Service, told: Invocation) -> None:
    """Build the parts and add their loops."""
    record, config, port = await open_run(told.url, told.run_id)
    metrics = Metrics(told.run_id, told.name)
    journal = _journal(record, told.name)
    arena, host = Arena(run_folder=record.folder), host_name()
    block_ms = config.broker.stream_block_ms
    between = Between(
        arena, port, await port.secret(), told.run_id, host, config.weights, block_ms, service.stopping,
        await backends_of(config.weights),
    )  # fmt: skip
    weights = WeightService(
        port,
        service,
        name=told.name,
        run_id=told.run_id,
        host=host,
        lease_s=config.weights.lease_s,
        block_ms=block_ms,
        metrics=metrics,
        journal=journal,
        arena=arena,
        between=between,
    )
    endpoint = Endpoint(metrics, weights.health, told.metrics_token)
    weights.metrics_url = await endpoint.start(told.metrics_host or config.telemetry.host, told.metrics_port)

    async def loops() -> None:
        try:
            await weights.run()
        finally:
            await endpoint.close()
            await port.close()
            if journal is not None:
                journal.close()

    async def hasten() -> None:
        """A service that leaves waits for a broker that is away no longer than at its start."""
        await service.stopping.wait()
        port.hasten()

    service.add("weights", loops)
    service.add("hasten", hasten)


def _journal(record: RunRecord, name: str) -> Journal | None:
    """In the run's folder, where this host has it."""
    folder = Path(record.folder)
    return Journal(folder / f"{name}.jsonl") if record.folder and folder.is_dir() else None


if __name__ == "__main__":
    sys.exit(run("weights", "weightsync", __doc__, sys.argv[1:], start, drain_s=DRAIN_S))
