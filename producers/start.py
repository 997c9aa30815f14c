"""From a URL and a run id to a producer whose loops are ready to run."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from broker.api import Hello, Peer, ProducerPort, RunRecord
from broker.connect import Run, open_run
from broker.messages import SCHEMA
from broker.turns import Device, shared_device
from headrace.config import Config
from headrace.errors import ConfigError, Refused
from headrace.hosts import host_name
from headrace.invocation import Invocation
from headrace.service import Service
from headrace.telemetry.arithmetic import Roofline
from headrace.telemetry.clock import process_began
from headrace.telemetry.endpoint import Endpoint
from headrace.telemetry.journal import Journal
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.phases import Lane
from headrace.telemetry.recorder import Recorder
from producers.chat import ByteChat, Chat, TemplateChat
from producers.engines.api import Engine, JoinsRun, SharesDevice
from producers.engines.registry import build_engine
from producers.environments.api import Environment
from producers.environments.calls import Calls
from producers.environments.lifetime import set_up
from producers.environments.registry import build_environment, environments_of
from producers.gauges import Gauges, journal_of
from producers.group import Stage
from producers.jobs import Jobs
from producers.loops import Producer
from producers.rewards.scorer import Scorer
from producers.rollout import Player
from producers.turns import Turns
from weightsync.arena import Arena
from weightsync.choosing import transport_of
from weightsync.receiver import Receiver

log = logging.getLogger(__name__)

MODELLESS = ("scripted",)
"""Engines that need no model: their tokens are bytes, and the run's digests are taken as they are."""


async def start(service: Service, told: Invocation) -> Producer:
    """Build all parts, join the run, and add the loops to the service. What was begun is ended when a part fails.

    Raises BrokerUnavailable, Refused, ConfigError, ModelError, EnvironmentLoadError, EngineError, ServiceError.
    """
    async with AsyncExitStack() as stack:
        record, config, port = await open_run(told.url, told.run_id)
        stack.push_async_callback(port.close)
        producer = await _assemble(service, told, record, config, port, stack)
        producer.on_close = stack.pop_all().aclose
    producer.add_loops()
    log.info("joined run %s as %s; waits for the first weights", told.run_id, told.name)
    return producer


async def _assemble(
    service: Service, told: Invocation, record: RunRecord, config: Config, port: Run, stack: AsyncExitStack
) -> Producer:
    host = host_name()
    # What can be refused cheaply comes before what takes long.
    environments = {name: build_environment(entry) for name, entry in environments_of(config).items()}
    folder = model_folder(config)
    digests = record.digests if folder is None else _digests(folder)
    metrics = Metrics(told.run_id, told.name)
    producer: Producer | None = None

    def health() -> dict[str, Any]:
        """It serves once it has its first weights."""
        serves = producer is not None and producer.version is not None
        shown = producer.health() if producer else {"phase": "start"}
        return {"ok": serves, "starting": not serves, "service": told.name, **shown}

    journal = journal_of(record.folder, told.name)
    recorder = _recorder(journal, stack)
    metrics_url = await _serve(Endpoint(metrics, health, told.metrics_token), told, config, stack)
    await _join(port, Hello(told.name, SCHEMA, digests, host, os.getpid(), metrics_url))

    scorer = start_scorer(config, stack)
    await set_up(environments, stack)
    chat = await load_chat(config, folder)
    engine = await start_engine(config, folder, stack, run=(told.run_id, record.folder), recorder=recorder)
    gauges = Gauges(engine, metrics, journal, recorder, scorer.lanes)

    turns = turns_of(told.name, config, port, host, engine)
    stage = stage_of(told.name, config, environments, player_of(config, engine, chat, turns), scorer)
    stage = replace(stage, heard=lambda task, _, __, score: gauges.scored(task.environment, score))
    jobs = Jobs(told.name, port, stage, config, gauges, service.stopping)
    receiver = await _receiver(told, config, port, host, engine, jobs, gauges, stack)
    producer = Producer(
        name=told.name,
        service=service,
        port=port,
        jobs=jobs,
        config=config,
        weights=receiver,
        peer=Peer(told.name, "producer", host, os.getpid(), True, {}),
        gauges=gauges,
        on_close=stack.aclose,
        metrics_url=metrics_url,
        turns=turns,
    )
    return producer


async def _receiver(
    told: Invocation,
    config: Config,
    port: Run,
    host: str,
    engine: Engine,
    jobs: Jobs,
    gauges: Gauges,
    stack: AsyncExitStack,
) -> Receiver:
    transport = await transport_of(config.weights, port, told.run_id, host, gauges.transport)
    stack.push_async_callback(transport.close)
    return Receiver(
        port,
        engine,
        told.name,
        host,
        run_id=told.run_id,
        lease_s=config.weights.lease_s,
        block_ms=config.broker.stream_block_ms,
        share=config.weights.staging_share,
        transport=transport,
        in_place=Arena() if config.run.placement != "disaggregated" else None,
        on_commit=jobs.on_commit,
        on_head=jobs.on_head,
        steering=jobs,
    )


def turns_of(name: str, config: Config, port: ProducerPort, host: str, engine: Engine) -> Turns | None:
    """On the device that it shares; None where it has one of its own. Raises ConfigError for an engine that cannot."""
    if config.run.placement != "colocated":
        return None
    if not isinstance(engine, SharesDevice):
        raise ConfigError(
            f"run.placement: 'colocated' needs an engine with release() and resume(), which producer.engine = "
            f'{config.producer.engine!r} does not have; use "disaggregated" or "hybrid"'
        )
    return Turns(Device(port, shared_device(config, host), name, config.producer.lease_s), engine)


def model_folder(config: Config) -> Path | None:
    """The model's folder on this machine; None for an engine that has no model. Raises ModelError."""
    if config.producer.engine in MODELLESS:
        return None
    from headrace.policy.prepare import resolve_model

    return resolve_model(config.model.path)


async def load_chat(config: Config, folder: Path | None) -> Chat:
    if folder is None:
        return ByteChat()
    return await asyncio.to_thread(TemplateChat.load, folder, config.model.tool_format)


def _recorder(journal: Journal | None, stack: AsyncExitStack) -> Recorder | None:
    """Writes what lanes do until all else that `stack` closes is closed."""
    if journal is None:
        return None
    recorder = Recorder(journal.write)
    stack.callback(journal.close)
    stack.callback(recorder.close)
    recorder.start()
    return recorder


async def start_engine(
    config: Config,
    folder: Path | None,
    stack: AsyncExitStack,
    run: tuple[str, str] | None = None,
    recorder: Recorder | None = None,
) -> Engine:
    """`run` is the id and the folder of the run that it samples for, where it is one. Closing `stack` ends it."""
    engine = build_engine(config.producer.engine, config, folder or Path(), config.run.seed)
    lane = getattr(engine, "lane", None)
    if run is not None and isinstance(lane, Lane):
        lane.place.shared = config.run.placement != "disaggregated"
        lane.backdate(process_began())
    if recorder is not None and isinstance(lane, Lane):
        recorder.add(lane)
    if run is not None and isinstance(engine, JoinsRun):
        engine.join_run(*run)
    stack.push_async_callback(engine.close)
    await engine.start()
    roofline = getattr(engine, "roofline", None)
    if recorder is not None and isinstance(lane, Lane) and isinstance(roofline, Roofline):
        recorder.add(lane, roofline)
    return engine


async def _serve(endpoint: Endpoint, told: Invocation, config: Config, stack: AsyncExitStack) -> str:
    """Serve until the stack is closed; the URL of /metrics. Raises ServiceError when the port is taken."""
    url = await endpoint.start(told.metrics_host or config.telemetry.host, told.metrics_port)
    stack.push_async_callback(endpoint.close)
    return url


def player_of(config: Config, engine: Engine, chat: Chat, turns: Turns | None = None) -> Player:
    """`turns` are told of what is asked of the engine."""
    calls = Calls(config.producer.reward_deadline_s)
    evaluation = config.evaluation.sampling(config.sampling)
    player = Player(engine, chat, config.sampling, calls, environments_of(config), evaluation=evaluation)
    return player if turns is None else replace(player, asking=turns.asking)


def stage_of(name: str, config: Config, environments: dict[str, Environment], player: Player, scorer: Scorer) -> Stage:
    return Stage(
        producer=name,
        player=player,
        environments=environments,
        scorer=scorer,
        min_group_size=config.producer.min_group_size,
        rewarded=frozenset(entry.called for entry in config.environments if entry.reward),
        grouped=frozenset(entry.called for entry in config.environments if any(part.group for part in entry.reward)),
    )


def start_scorer(config: Config, stack: AsyncExitStack) -> Scorer:
    """Closing `stack` ends its processes."""
    producer = config.producer
    scorer = Scorer(
        environments_of(config),
        workers=producer.reward_workers,
        deadline_s=producer.reward_deadline_s,
        memory_mb=producer.reward_memory_mb,
    )
    stack.push_async_callback(scorer.close)
    scorer.start()
    return scorer


def _digests(folder: Path) -> dict[str, str]:
    from headrace.policy.loading import model_digests

    return model_digests(folder)


async def _join(port: ProducerPort, hello: Hello) -> None:
    """Raises Refused when the run has ended or is another one."""
    run = await port.state()
    if run.status in ("finished", "failed"):
        reason = f": {run.reason}" if run.reason else ""
        raise Refused(f"the run is {run.status}{reason}; a producer has nothing to do there")
    await port.join(hello)
