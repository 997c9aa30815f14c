"""The trainer of a run: groups in, optimizer steps out.

Needs only the broker's URL and the run's id: HEADRACE_REDIS_URL and HEADRACE_RUN, or flags. A URL with a password is
taken from the environment only. `torchrun --nproc-per-node 2 -m consumers` starts one of two ranks.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from broker.connect import Run, open_run
from headrace.config import Config
from headrace.invocation import Invocation, run
from headrace.service import Service

if TYPE_CHECKING:
    from consumers.parts import Taken
    from consumers.progress import Progress
    from consumers.ranks.group import Ranks
    from headrace.telemetry.metrics import Metrics
    from headrace.telemetry.phases import Lane

DRAIN_S = 120.0
"""A trainer told to leave finishes its step and writes a checkpoint for at most this long."""


async def start(service: Service, told: Invocation) -> None:
    """Become the run's trainer, or one of its ranks, and add the loops. Raises HeadraceError when it cannot."""
    _, config, port = await open_run(told.url, told.run_id)

    # These load torch, which a run that is not there need not wait for.
    from consumers.ranks.children import end_with_parent
    from consumers.ranks.follower import follow
    from consumers.ranks.group import reason_of
    from consumers.ranks.joining import join

    end_with_parent()

    # Nothing else is under way yet, and what it starts is to end with this thread.
    ranks = join(config, told.name, os.environ)
    begin = follow if ranks.rank else lead
    try:
        await begin(service, told, config, port, ranks)
    except BaseException as error:
        await asyncio.to_thread(ranks.fail, reason_of(error))
        raise


async def lead(service: Service, told: Invocation, config: Config, port: Run, ranks: Ranks) -> None:
    """As rank 0."""
    from consumers.lanes import trainer_lane
    from consumers.logs import check_loggers
    from consumers.loops import TrainerLoops
    from consumers.parts import build, take_run
    from consumers.ranks.group import PublishingRanks, reason_of
    from headrace.telemetry.endpoint import Endpoint
    from headrace.telemetry.metrics import Metrics
    from weightsync.arena import Arena
    from weightsync.publisher import Publisher

    check_loggers(config.logs.to)
    taken = await take_run(port, told.resume)
    lane, metrics = trainer_lane(config), Metrics(told.run_id, told.name)
    progress = _progress(told, config, taken, lane, metrics)
    progress.record()
    try:
        parts = await asyncio.to_thread(build, taken, lane, ranks)
        progress.begin(await asyncio.to_thread(parts.trainer.roofline))
    except BaseException:
        progress.close()
        raise
    lane.enter("bookkeeping")
    publisher = Publisher(
        port,
        taken.fence,
        parts.layout,
        told.run_id,
        config.weights.max_live_versions,
        arena=Arena(run_folder=taken.record.folder),
        ranks=PublishingRanks(ranks),
    )
    progress.bounds(config.staleness.max_lag, config.broker.retain_bytes)
    loops = TrainerLoops(service, port, parts, publisher, progress)
    endpoint = Endpoint(metrics, loops.health, told.metrics_token)
    loops.metrics_url = await endpoint.start(told.metrics_host or config.telemetry.host, told.metrics_port)

    async def trains() -> None:
        try:
            await loops.run()
            await asyncio.to_thread(ranks.end)
        except BaseException as error:
            await asyncio.to_thread(ranks.fail, reason_of(error))
            raise
        finally:
            await endpoint.close()
            await port.close()

    service.add("trainer", trains)


def _progress(told: Invocation, config: Config, taken: Taken, lane: Lane, metrics: Metrics) -> Progress:
    """What the trainer says, in the run's folder and to experiment logs."""
    from consumers.lanes import external_lanes
    from consumers.logs import Logs, loggers_of
    from consumers.progress import Progress

    labels, folder = {environment.called for environment in config.environments}, Path(taken.record.folder)
    logs = Logs(loggers_of(config.logs, told.run_id, folder, taken.record.config))
    return Progress(folder, lane, metrics, taken.fence.incarnation, labels, external_lanes(config), logs)


if __name__ == "__main__":
    sys.exit(run("trainer", "consumers", __doc__, sys.argv[1:], start, drain_s=DRAIN_S, resumes=True))
