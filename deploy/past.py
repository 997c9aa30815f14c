"""Runs that have ended, read from what their own Redis left on the disk."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress

from broker.connect import Run, connect_run
from deploy.connections import NAME_OF_URL, local_run, named, open_operator, runs_folder, told_url
from deploy.redis_server import RedisServer
from deploy.run_folder import RunFolder, local_runs
from headrace.config import BrokerConfig
from headrace.errors import ConfigError, Refused, ServiceError


@asynccontextmanager
async def open_past(run: str | None) -> AsyncIterator[tuple[str, Run, bool]]:
    """The id and port of the run that is meant (else the newest live one, else the newest), and whether it still lives.

    For one that has ended a Redis is started on its data, and stopped again; nobody resumes the run meanwhile. Raises
    ConfigError, BrokerUnavailable, Refused, ServiceError.
    """
    ended = _ended(named(run)) if told_url() is None else None
    if ended is None:
        async with open_operator(run) as (run_id, operator):
            yield run_id, operator, True
        return
    if not ended.redis_folder.is_dir():
        raise ConfigError(f"run {ended.run_id} had no Redis of its own; set {NAME_OF_URL} to the one that it was in")
    with ExitStack() as stack:
        ended.lock()
        stack.callback(ended.unlock)
        server = RedisServer(ended.redis_folder, ended.log("redis"))
        stack.callback(server.stop)
        server.start()
        operator = connect_run(server.url, ended.run_id, BrokerConfig())
        try:
            await _check_kept(ended, operator)
            yield ended.run_id, operator, False
        finally:
            await operator.close()


def _ended(run: str | None) -> RunFolder | None:
    """None where a live one is meant, or there is none at all."""
    if run is not None:
        folder = local_run(run)
        return None if folder.live else folder
    found = local_runs(runs_folder())
    for folder in found:
        # One whose lock cannot be read must not hide the others.
        with suppress(ServiceError):
            if folder.live:
                return None
    return found[-1] if found else None


async def _check_kept(run: RunFolder, operator: Run) -> None:
    try:
        await operator.record()
    except Refused:
        raise ConfigError(
            f"run {run.run_id} has ended, and its rollouts are gone: its Redis keeps them for a week after the end, "
            "where it is not lost itself"
        ) from None
