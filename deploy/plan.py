"""What `headrace up` is going to do, settled before anything starts: configuration, run id, folder, model."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from broker.connect import MEMORY, connect_runs
from deploy.inspection import Facts, inspect
from deploy.progress import newest_step
from deploy.run_folder import RunFolder, check_run_id, local_runs, new_run_id
from headrace.config import BrokerConfig, Config
from headrace.config_sources import Resolved, flatten, resolve
from headrace.config_trainer import INITIAL
from headrace.errors import ConfigError, HeadraceError, ServiceError
from headrace.files import at_home, write_json
from headrace.words import counted

MAY_CHANGE = frozenset({"producer.count", "run.steps", "telemetry.port", "trainer.ranks"})
"""Keys that `--resume` may give another value: no step that was made depends on them."""
_PORTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asked for."""

    file: Path | None = None
    run_id: str | None = None
    overrides: tuple[str, ...] = ()
    resume: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    config: Config
    folder: RunFolder
    facts: Facts
    resume: bool
    changes: tuple[str, ...] = ()
    """What a resumed run does differently, one sentence each."""


def make_plan(wish: Wish, environ: Mapping[str, str], now: datetime, url: str | None = None) -> Plan:
    """Settle everything; nothing is left behind when it fails, else the folder exists and is locked.

    `url` is a broker that must be there. Raises ConfigError, ModelError, EnvironmentLoadError, BrokerUnavailable,
    ServiceError.
    """
    if wish.run_id is not None:
        check_run_id(wish.run_id)
    _check_working_folder()
    resolved = resolve(wish.file, environ, wish.overrides)
    runs = at_home(resolved.config.run.folder, "run.folder").absolute()
    folder = _resumable(wish, runs) if wish.resume else RunFolder(runs / (wish.run_id or new_run_id(now)))
    with _held(folder, new=not wish.resume):
        config = localized(resolved.config)
        changes: tuple[str, ...] = ()
        if wish.resume:
            config, changes = merged(folder.read_json(folder.config_file) or {}, resolved)
            _check_unfinished(folder, config)
        check_ports(config)
        if url:
            asyncio.run(_reach(url, config.broker))
        facts = inspect(config)
        write_json(folder.config_file, config.model_dump(mode="json"))
        write_json(folder.facts_file, asdict(facts))
    return Plan(config, folder, facts, wish.resume, changes)


@contextmanager
def _held(folder: RunFolder, *, new: bool) -> Iterator[None]:
    """Hold the run from here on, so that no other launcher changes what is read; where what follows fails, let it go.

    Raises ServiceError for a run that is held already, ConfigError for a `new` one that there is.
    """
    if new:
        _check_new(folder)
        folder.make()
    try:
        folder.lock()
        if new:  # another launcher may have come and gone meanwhile
            _check_new(folder)
    except HeadraceError:
        folder.unlock()
        raise
    try:
        yield
    except BaseException:
        if new:
            folder.discard()
        folder.unlock()
        raise


def _check_working_folder() -> None:
    try:
        Path.cwd()
    except OSError as error:
        raise ConfigError(f"the working folder cannot be used ({error.strerror}); change to another one") from None


async def _reach(url: str, config: BrokerConfig) -> None:
    if url.startswith(MEMORY):
        raise ConfigError(
            f"{MEMORY} is one process's own broker; the services of a run need a Redis that all can reach"
        )
    runs = connect_runs(url, config)
    try:
        await runs.ping()
    finally:
        await runs.close()


def _check_new(folder: RunFolder) -> None:
    if folder.config_file.exists():
        raise ConfigError(
            f"run {folder.run_id} exists already in {folder.path.parent}; go on with it by --resume, or take another "
            "--run"
        )


def _resumable(wish: Wish, runs: Path) -> RunFolder:
    if wish.run_id:
        folder = RunFolder(runs / wish.run_id)
        if not folder.config_file.exists():
            raise ConfigError(f"there is no run {wish.run_id} in {runs} to resume; `headrace runs list` names all")
        return folder
    newest = next((run for run in reversed(local_runs(runs)) if not run.live), None)
    if newest is None:
        raise ConfigError(f"there is no run in {runs} to resume; `headrace up` starts one")
    return newest


def _check_unfinished(folder: RunFolder, config: Config) -> None:
    """A finished run with nothing left to do keeps its results. Raises ConfigError."""
    made = (folder.read_json(folder.summary_file) or {}).get("steps", 0)
    if type(made) is not int:
        raise ServiceError(
            f"{folder.summary_file} is damaged: steps = {_shown(made)} is no whole number; "
            "delete it to go on with the run"
        )
    reached = newest_step(folder.steps_file) or 0
    if made < config.run.steps < reached:
        raise ConfigError(
            f"run.steps: {config.run.steps} is below step {reached}, which run {folder.run_id} has reached; "
            f"name at least that"
        )
    if made >= config.run.steps:
        raise ConfigError(
            f"run {folder.run_id} has made all its {counted(made, 'step')}, see {folder.summary_file}; "
            f"a larger run.steps makes more (`--steps N`, or HEADRACE__RUN__STEPS=N)"
        )


def _shown(value: object) -> str:
    return repr(value)[:80]


def merged(stored: dict[str, Any], resolved: Resolved) -> tuple[Config, tuple[str, ...]]:
    """The stored configuration with the few changes that are allowed. Raises ConfigError for any other."""
    wanted = dict(flatten(localized(resolved.config).model_dump(mode="json")))
    present = dict(flatten(stored))
    changes, overrides = [], {}
    for key, origin in resolved.origins.items():
        for name in [name for name in wanted if name == key or name.startswith(f"{key}.")]:
            if wanted[name] == present.get(name):
                continue
            if name not in MAY_CHANGE:
                raise ConfigError(
                    f"{name} = {wanted[name]!r} (from {origin}) differs from the run's {present.get(name)!r}; "
                    f"a resumed run may change only {', '.join(sorted(MAY_CHANGE))}"
                )
            overrides[name] = wanted[name]
            changes.append(f"{name} is now {wanted[name]!r}, was {present.get(name)!r}")
    try:
        tree = Config.model_validate(stored).model_dump(mode="json")
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"the stored configuration is of another headrace: {key}: {first['msg']}") from None
    for name, value in overrides.items():
        section, leaf = name.split(".")
        tree[section][leaf] = value
    return Config.model_validate(tree), tuple(changes)


def localized(config: Config) -> Config:
    """With absolute paths where a value is a file or folder of this machine: services may start in another folder."""
    tree = config.model_dump(mode="json")
    for section, key in (("model", "path"), ("trainer", "reference")):
        folder = at_home(tree[section][key], f"{section}.{key}")
        if folder.is_dir() and tree[section][key] != INITIAL:
            tree[section][key] = str(folder.absolute())
    tree["run"]["folder"] = str(at_home(config.run.folder, "run.folder").absolute())
    for environment in tree["environments"]:
        for named in (environment, *environment["reward"]):
            named["name"] = _absolute_file(named["name"], "environments")
    evaluation = tree["evaluation"]
    evaluation["environment"] = [_absolute_file(name, "evaluation.environment") for name in evaluation["environment"]]
    return Config.model_validate(tree)


def _absolute_file(reference: str, key: str) -> str:
    """`path/to/file.py:object` with an absolute path; anything else as it is."""
    file, colon, name = reference.rpartition(":")
    if not (colon and file.endswith(".py")):
        return reference
    path = at_home(file, key)
    return f"{path.absolute()}:{name}" if path.is_file() else reference


def check_ports(config: Config) -> None:
    """Raises ServiceError when a telemetry port that the run's services will need is taken, ConfigError for none."""
    services = config.producer.count + 2 if config.telemetry.port else 0
    if config.telemetry.port + services > _PORTS:
        raise ConfigError(
            f"telemetry.port = {config.telemetry.port} leaves no ports for all {services} services, which take one "
            f"each from there on; set it to {_PORTS - services} at most, or to 0 for free ones"
        )
    for port in range(config.telemetry.port, config.telemetry.port + services):
        with socket.socket(socket.AF_INET6 if ":" in config.telemetry.host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.telemetry.host, port))
            except OSError as error:
                raise ServiceError(
                    f"port {port} on {config.telemetry.host} is taken (telemetry.port = {config.telemetry.port} and "
                    f"the ports after it, one per service): {error}; choose another, or 0 for free ones"
                ) from error
