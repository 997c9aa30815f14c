"""The example of an environment with a tool: played, scored, and short."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

from headrace.config_sources import resolve
from producers.environments.registry import build_environment, environments_of
from producers.rollout import Played, play
from tests.replies import player_of
from tests.rollouts import TASK

EXAMPLE = Path("examples/own_tools.toml")


def shopper(shown: str) -> str:
    """Looks the price up, after a try that the tool refuses."""
    item, count = re.findall(r"Item: (\w+)\. Count: (\d+)\.", shown)[-1]
    results = re.findall(r"<tool_response>\n(.*)\n</tool_response>", shown)
    if not results:
        return f'<tool_call>{{"name": "price", "arguments": {{"item": "{item}", "count": 0}}}}</tool_call>'
    if len(results) == 1:
        return f'<tool_call>{{"name": "price", "arguments": {{"item": "{item}", "count": {count}}}}}</tool_call>'
    return str(results[-1])


def test_it_is_played_to_its_end() -> None:
    config = resolve(EXAMPLE, {}, ()).config
    (entry,) = environments_of(config).values()
    environment = build_environment(entry)
    player, _ = player_of(shopper)

    async def games(kind: str, size: int) -> list[Played]:
        tasks = [replace(TASK, kind=kind, index=index) for index in range(size)]
        return await asyncio.gather(*(play(player, environment, task, 0) for task in tasks))

    played = asyncio.run(games("train", len(environment)))
    held_out = asyncio.run(games("eval", environment.eval_size()))
    assert len(played) + len(held_out) == 36
    assert not {game.rollout.prompt for game in played} & {game.rollout.prompt for game in held_out}
    assert environment.eval_size() >= config.evaluation.prompts
    for game in (*played, *held_out):
        assert environment.correct(game.rollout)
        assert [turn.reward for turn in game.rollout.turns] == [0.0, 0.1, 0.0]
        shown = player.chat.text(game.transcript.token_ids())
        assert "Error: price raised ValueError: count must be at least 1" in shown


def test_it_is_short() -> None:
    assert len(EXAMPLE.with_suffix(".py").read_text().splitlines()) <= 70
