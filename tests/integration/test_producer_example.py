"""The example of one's own environment and reward loads, is sound, and is scored in a reward process."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.config_sources import resolve
from producers.environments.api import Rollout
from producers.environments.registry import build_environment, environments_of
from producers.rewards.scorer import Scorer
from producers.rewards.worker import Score

EXAMPLE = Path("examples/own_environment.toml")


async def test_the_example_is_scored_by_its_own_reward() -> None:
    config = resolve(EXAMPLE, {}, ()).config
    (name, entry), *_ = environments_of(config).items()
    environment = build_environment(entry)

    async def prompts(split: str, size: int) -> set[str]:
        shown = [await environment.episode(split, index, 0).reset() for index in range(size)]
        return {observation.messages[0].content for observation in shown}

    train = await prompts("train", len(environment))
    held_out = await prompts("eval", environment.eval_size())
    assert len(train) + len(held_out) == 12 * 11
    assert not train & held_out
    assert environment.eval_size() >= config.evaluation.prompts

    answer = environment.episode("train", 0, 0).answer
    scorer = Scorer({name: entry}, workers=1, deadline_s=10.0)
    try:
        said = (f'"{answer}"', f"It is: {answer}.", "nothing")
        rollouts = [Rollout(name, 0, "", text, (), answer, "stop") for text in said]
        scores = await asyncio.gather(*(scorer.score(name, "train", rollout) for rollout in rollouts))
        judged = await asyncio.gather(*(scorer.score(name, "eval", rollout) for rollout in rollouts))
    finally:
        await scorer.close()
    assert scores == [Score(1.0, correct=True), Score(0.5, correct=True), Score(0.0, correct=False)]
    assert judged == [Score(1.0, correct=True), Score(1.0, correct=True), Score(0.0, correct=False)]


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.with_suffix(".py").read_text().splitlines()) <= 60
