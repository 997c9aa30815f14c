"""A producer's parts without a broker: engine, chat, environments and scorer, to play tasks of one's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from broker.messages import Task
from headrace.config import Config
from headrace.version import PolicyVersion
from producers.chat import ByteChat, Chat, TemplateChat
from producers.engines.api import Engine
from producers.engines.registry import build_engine
from producers.environments.api import Environment
from producers.environments.lifetime import set_up
from producers.environments.registry import build_environment, environments_of
from producers.group import Stage
from producers.rollout import Played, Player
from producers.start import MODELLESS, player_of, scorer_of, stage_of

FIRST = PolicyVersion(1, 0)
"""What the engine's own weights, those of the model's folder, are called."""


async def open_player(config: Config, stack: AsyncExitStack) -> Player:
    """An engine that samples from the model's own weights, and how to talk to it. Closing `stack` ends it.

    Raises ModelError, ConfigError, EngineError.
    """
    folder = None if config.producer.engine in MODELLESS else await asyncio.to_thread(_folder, config.model.path)
    chat: Chat = ByteChat()
    if folder is not None:
        chat = await asyncio.to_thread(TemplateChat.load, folder, config.model.tool_format)
    engine: Engine = build_engine(config.producer.engine, config, folder or Path(), config.run.seed)
    stack.push_async_callback(engine.close)
    await engine.start()
    await engine.commit(FIRST)
    return player_of(config, engine, chat)


async def open_environments(config: Config, stack: AsyncExitStack) -> dict[str, Environment]:
    """All environments of the configuration, set up. Raises EnvironmentLoadError."""
    environments = {name: build_environment(entry) for name, entry in environments_of(config).items()}
    await set_up(environments, stack)
    return environments


def open_stage(
    config: Config,
    player: Player,
    environments: dict[str, Environment],
    stack: AsyncExitStack,
    heard: Callable[[Task, int, Played], None] | None = None,
) -> Stage:
    """Where whole groups are played and scored, as a producer does. Closing `stack` ends the scorer's processes."""
    scorer = scorer_of(config)
    stack.push_async_callback(scorer.close)
    scorer.start()
    return replace(stage_of("solo", config, environments, player, scorer), min_group_size=1, heard=heard)


def _folder(path: str) -> Path:
    from headrace.policy.prepare import resolve_model

    return resolve_model(path)
