"""The small model calls its calculator: a real tokenizer, a real engine, and the example's own configuration."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from headrace.config_sources import resolve
from producers.rollout import play
from producers.solo import open_environments, open_player
from tests.rollouts import TASK

EXAMPLE = Path("examples/tool_arithmetic.toml")
QUESTIONS = 4


async def test_it_calls_the_tool_and_says_its_result() -> None:
    """Greedily, so that it is the same each time."""
    config = resolve(EXAMPLE, {}, ("sampling.temperature=0",)).config
    async with AsyncExitStack() as stack:
        player = await open_player(config, stack)
        (environment,) = (await open_environments(config, stack)).values()
        tasks = [replace(TASK, environment="tool_arithmetic", index=1211 * n) for n in range(QUESTIONS)]
        games = await asyncio.gather(*(play(player, environment, task, 0) for task in tasks))
        shown = [player.chat.text(game.transcript.token_ids()) for game in games]
    called = [game for game in games if game.turn_reward > 0]
    assert called, shown
    for game in called:
        calls = [call for turn in game.rollout.turns for call in turn.tool_calls]
        assert calls[0].name == "calculator"
        assert set(calls[0].arguments) == {"expression"}
    assert any(environment.correct(game.rollout) for game in called), shown
