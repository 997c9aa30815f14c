"""A producer's parts without a broker: engine, chat, environments and scorer, to play tasks of one's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace

from broker.messages import Task
from headrace.config import Config
from headrace.version import PolicyVersion
from producers.environments.api import Environment
from producers.environments.lifetime import set_up
from producers.environments.registry import build_environment, environments_of
from producers.group import Stage
from producers.rewards.worker import Score
from producers.rollout import Played, Player
from producers.start import load_chat, model_folder, player_of, stage_of, start_engine, start_scorer

FIRST = PolicyVersion(1, 0)
"""What the engine's own weights, those of the model's folder, are called."""


async def open_player(config: Config, stack: AsyncExitStack) -> Player:
    """An engine that samples from the model's own weights, and how to talk to it. Closing `stack` ends it.

    Raises ModelError, ConfigError, EngineError.
    """
    folder = await asyncio.to_thread(model_folder, config)
    chat = await load_chat(config, folder)
    engine = await start_engine(config, folder, stack)
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
    heard: Callable[[Task, int, Played, Score], None] | None = None,
) -> Stage:
    """Where whole groups are played and scored, as a producer does. Closing `stack` ends the scorer's processes."""
    scorer = start_scorer(config, stack)
    return replace(stage_of("solo", config, environments, player, scorer), min_group_size=1, heard=heard)
