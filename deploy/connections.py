"""Which run a command means, and a connection to its broker."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from broker.api import OperatorPort, Runs
from broker.connect import Run, connect_run, connect_runs
from deploy.run_folder import Connection, RunFolder, check_run_id, local_runs
from headrace.config import BrokerConfig
from headrace.config_sources import resolve
from headrace.errors import ConfigError, Refused, ServiceError
from headrace.files import at_home
from headrace.secret import redis_url

NAME_OF_URL = "HEADRACE_REDIS_URL"
NAME_OF_RUN = "HEADRACE_RUN"


def told_url() -> str | None:
    """The broker that the environment names, by itself or in a file; None where it names none. Raises ConfigError."""
    return redis_url(os.environ) or None


def runs_folder() -> Path:
    """Where the runs of this working folder lie."""
    return at_home(resolve(None, os.environ, ()).config.run.folder, "run.folder").absolute()


def named(run: str | None) -> str | None:
    """The run that was asked for, by option or environment. Raises ConfigError for an option that names none."""
    if run == "":
        raise ConfigError("--run '' names no run; leave it out for the newest live one")
    run = run or os.environ.get(NAME_OF_RUN) or None
    return check_run_id(run) if run else None


def local_run(run: str) -> RunFolder:
    """The folder of a run of this working folder, live or not. Raises ConfigError when there is none."""
    folder = RunFolder(runs_folder() / check_run_id(run))
    if not folder.config_file.exists():
        raise ConfigError(f"there is no run {run} in {folder.path.parent}; `headrace runs list` names all")
    return folder


def local_connection(run: str | None) -> Connection:
    """That of the named run, else of the newest live one. Raises ConfigError when there is none."""
    if run:
        folder = local_run(run)
        connection = folder.connection()
        if connection is None or not folder.live:
            if folder.summary_file.exists():
                raise ConfigError(f"run {run} has finished; its results are in {folder.path}")
            raise ConfigError(f"run {run} is not running; `headrace up --resume --run {run}` goes on with it")
        return connection
    runs = runs_folder()
    for folder in reversed(local_runs(runs)):
        # One whose lock cannot be read must not hide the others; by its name it is refused.
        with contextlib.suppress(ServiceError):
            if folder.live and (connection := folder.connection()):
                return connection
    raise ConfigError(f"no run is running in {runs}; start one with `headrace up`, or set {NAME_OF_URL}")


async def connect(url: str, run_id: str, config: BrokerConfig) -> tuple[Runs, OperatorPort]:
    """Both sides of the command line's broker. Raises BrokerUnavailable after the configured time."""
    runs = connect_runs(url, config)
    await runs.ping()
    return runs, connect_run(url, run_id, config)


@asynccontextmanager
async def open_runs() -> AsyncIterator[Runs | None]:
    """The runs of the broker that the environment names; None where it names none."""
    url = told_url()
    if not url:
        yield None
        return
    runs = connect_runs(url, _config())
    try:
        await runs.ping()
        yield runs
    finally:
        await runs.close()


async def living(run_id: str) -> list[str]:
    """Services of a run that live by the broker which the environment names, whoever started them."""
    url = told_url()
    if not url:
        return []
    port = connect_run(url, run_id, _config())
    try:
        return sorted(peer.name for peer in await port.peers() if peer.alive)
    except Refused:
        return []  # the broker has no such run
    finally:
        await port.close()


@asynccontextmanager
async def open_operator(run: str | None) -> AsyncIterator[tuple[str, Run]]:
    """The id and port of the run that is meant. Raises ConfigError, BrokerUnavailable, Refused."""
    run = named(run)
    if url := told_url():
        run = run or await _only_run(url)
    else:
        connection = local_connection(run)
        run, url = connection.run_id, connection.url
    operator = connect_run(url, run, _config())
    try:
        await operator.record()
        yield run, operator
    finally:
        await operator.close()


async def _only_run(url: str) -> str:
    runs = connect_runs(url, _config())
    try:
        await runs.ping()
        ids = await runs.ids()
    finally:
        await runs.close()
    if len(ids) == 1:
        return ids[0]
    found = f"holds {len(ids)} runs" if ids else "holds no run"
    raise ConfigError(f"the broker of {NAME_OF_URL} {found}; name one with --run (`headrace runs list` names all)")


def _config() -> BrokerConfig:
    return resolve(None, os.environ, ()).config.broker
