"""`python -m consumers [--resume]`: the trainer of run HEADRACE_RUN, on the Redis of HEADRACE_REDIS_URL."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys

from headrace.errors import ConfigError, HeadraceError
from headrace.service import Service, main

DRAIN_S = 120.0
"""A trainer told to leave finishes its step and writes a checkpoint for at most this long."""


async def start(service: Service, url: str, run_id: str, resume: bool) -> None:
    """Become the run's trainer and add its loops. Raises HeadraceError when it cannot."""
    from broker.connect import connect_run
    from headrace.config_sources import stored

    first = connect_run(url, run_id)
    try:
        config = stored((await first.record()).config)
    finally:
        await first.close()

    # These load torch, which a run that is not there need not wait for.
    from consumers.loops import TrainerLoops
    from consumers.parts import build, take_run
    from consumers.progress import Progress
    from headrace.telemetry.endpoint import Endpoint
    from headrace.telemetry.metrics import Metrics
    from headrace.telemetry.phases import Lane
    from weightsync.publisher import Publisher

    port = connect_run(url, run_id, config.broker)
    record, fence, found = await take_run(port, resume)
    lane, metrics = Lane("trainer", "load"), Metrics(run_id, service.name)
    parts = await asyncio.to_thread(build, record, fence, found, lane)
    lane.enter("other")
    publisher = Publisher(port, fence, parts.layout, run_id, config.weights.max_live_versions)
    loops = TrainerLoops(service, port, parts, publisher, Progress(parts.folder, lane, metrics))
    endpoint = Endpoint(metrics, loops.health)
    await endpoint.start(config.telemetry.host, metrics_port(config.telemetry.port))
    loops.metrics_url = f"http://{config.telemetry.host}:{endpoint.port}/metrics"

    async def run() -> None:
        try:
            await loops.run()
        finally:
            await endpoint.close()
            await port.close()

    service.add("trainer", run)


def metrics_port(configured: int) -> int:
    """$HEADRACE_METRICS_PORT, else as configured. Raises ConfigError for one that is no port."""
    text = os.environ.get("HEADRACE_METRICS_PORT", str(configured))
    if not text.isdecimal() or int(text) > 65535:
        raise ConfigError(f"HEADRACE_METRICS_PORT = {text!r} is not a port; use 0 for a free one")
    return int(text)


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m consumers", description="The trainer of one headrace run.")
    parser.add_argument("--run", default=os.environ.get("HEADRACE_RUN"), help="run id (default: $HEADRACE_RUN)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    return parser.parse_args(argv)


def run(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    given = arguments(argv)
    url = os.environ.get("HEADRACE_REDIS_URL")
    try:
        if not url or not given.run:
            raise ConfigError("the trainer needs HEADRACE_REDIS_URL and HEADRACE_RUN in its environment")
    except HeadraceError as error:
        print(f"trainer: {error}", file=sys.stderr)
        return error.exit_code
    return main(NAME, lambda service: start(service, url, given.run, given.resume), drain_s=DRAIN_S)


NAME = "trainer"

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
