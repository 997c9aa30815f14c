"""`headrace register`: a run's folder and its record at the broker, for services that something else starts.

What `headrace up` does before it starts the services, so that compose, Kubernetes or a person can start them. A second
time it goes on with the run that is there, and disturbs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from deploy.connections import NAME_OF_URL, connect, told_url
from deploy.plan import Plan, Wish, localized, make_plan
from deploy.registrar import Registrar
from deploy.run_folder import RunFolder, check_run_id
from headrace.config_sources import resolve
from headrace.errors import ConfigError


def register(wish: Wish, environ: Mapping[str, str], now: datetime) -> str:
    """Returns a sentence. Raises ConfigError, ModelError, EnvironmentLoadError, BrokerUnavailable, ServiceError."""
    url = told_url()
    if url is None:
        raise ConfigError(f"{NAME_OF_URL} is not set; it names the broker that the run's services share")
    if wish.run_id is None:
        raise ConfigError("no run is named; set HEADRACE_RUN or pass --run, so that a second start finds the same run")
    config = localized(resolve(wish.file, environ, wish.overrides).config)
    there = RunFolder(Path(config.run.folder) / check_run_id(wish.run_id))
    plan = make_plan(replace(wish, resume=there.config_file.exists()), environ, now, url)
    try:
        asyncio.run(_record(plan, url))
    finally:
        plan.folder.unlock()
    return "; ".join((f"run {plan.folder.run_id} is registered, its folder is {plan.folder.path}", *plan.changes))


async def _record(plan: Plan, url: str) -> None:
    runs, operator = await connect(url, plan.folder.run_id, plan.config.broker)
    try:
        await Registrar(plan, runs, operator).register()
    finally:
        await operator.close()
        await runs.close()
