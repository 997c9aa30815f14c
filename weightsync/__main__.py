"""`python -m weightsync`: the weight service of this host.

Needs only the broker's URL and the run's id, from the environment. The URL may hold a secret, so it is never an
argument.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from broker.api import RunRecord
from broker.connect import connect_run
from headrace.config_sources import stored
from headrace.errors import ConfigError
from headrace.service import Service, main
from headrace.telemetry.endpoint import Endpoint
from headrace.telemetry.journal import Journal
from headrace.telemetry.metrics import Metrics
from weightsync.service import WeightService

DRAIN_S = 20.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What this process is told; the rest stands in the run's record."""

    url: str
    run_id: str
    host: str
    name: str
    metrics_port: int

    @classmethod
    def of(cls, arguments: list[str], environ: Mapping[str, str]) -> Settings:
        """Raises ConfigError with what is missing."""
        parser = argparse.ArgumentParser("python -m weightsync", description=__doc__)
        parser.add_argument("--run", default=environ.get("HEADRACE_RUN"), help="run id (default: $HEADRACE_RUN)")
        parser.add_argument(
            "--name", default=environ.get("HEADRACE_NAME"), help="default: $HEADRACE_NAME, or the host's"
        )
        parser.add_argument(
            "--metrics-port",
            default=environ.get("HEADRACE_METRICS_PORT", "0"),
            help="of /metrics and /healthz on loopback; 0 is a free one (default: $HEADRACE_METRICS_PORT, or 0)",
        )
        options = parser.parse_args(arguments)
        url = environ.get("HEADRACE_REDIS_URL")
        if not url:
            raise ConfigError("HEADRACE_REDIS_URL is not set; it names the run's broker, as redis://host:6379")
        if not options.run:
            raise ConfigError("no run is named; set HEADRACE_RUN or pass --run")
        if not options.metrics_port.isdecimal() or int(options.metrics_port) > 65535:
            raise ConfigError(f"metrics port {options.metrics_port!r} is not a number from 0 to 65535")
        host = socket.gethostname()
        return cls(url, options.run, host, options.name or f"weights-{host}", int(options.metrics_port))


async def start(service: Service, settings: Settings) -> None:
    """Build the parts and add their one loop."""
    asking = connect_run(settings.url, settings.run_id)
    try:
        record = await asking.record()
    finally:
        await asking.close()
    config = stored(record.config)
    metrics = Metrics(settings.run_id, settings.name)
    port = connect_run(settings.url, settings.run_id, config.broker)
    journal = _journal(record, settings.name)
    weights = WeightService(
        port,
        service,
        name=settings.name,
        run_id=settings.run_id,
        host=settings.host,
        lease_s=config.weights.lease_s,
        block_ms=config.broker.stream_block_ms,
        metrics=metrics,
        journal=journal,
    )
    endpoint = Endpoint(metrics, weights.health)
    await endpoint.start(config.telemetry.host, settings.metrics_port)
    weights.metrics_url = f"http://{config.telemetry.host}:{endpoint.port}/metrics"

    async def loops() -> None:
        try:
            await weights.run()
        finally:
            await endpoint.close()
            await port.close()
            if journal is not None:
                journal.close()

    service.add("weights", loops)


def _journal(record: RunRecord, name: str) -> Journal | None:
    """In the run's folder, where this host has it."""
    folder = Path(record.folder)
    return Journal(folder / f"{name}.jsonl") if record.folder and folder.is_dir() else None


def run(arguments: list[str]) -> int:
    """Run the service; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings = Settings.of(arguments, os.environ)
    except ConfigError as error:
        print(f"weights: {error}", file=sys.stderr)
        return error.exit_code

    async def begin(service: Service) -> None:
        await start(service, settings)

    return main(settings.name, begin, drain_s=DRAIN_S)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
