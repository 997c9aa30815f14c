"""A game of several turns on the embedded engine, from random weights: whole runs, whose policy must get better."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launches import Launches

STEPS = 30
GAME = """[{name = "guess_number", max_tokens_per_turn = 1, max_turns = 2, options = {
    size = 2, turns = 2, ranges = 2, held_out = 1, valid = 0.3, prompt = "{low}-{high}"}}]"""


def test_a_game_of_several_turns_is_learnt(launched: Launches, tiny_model: Path) -> None:
    """A bare number is one of 258 tokens at first; then feedback tells the two numbers of the range apart."""
    sets = {
        "environments": " ".join(GAME.split()),
        "trainer.learning_rate": "0.005",
        "trainer.groups_per_step": "8",
        "producer.slots": "64",
        "evaluation.prompts": "2",
        "checkpoint.every": "1000",
        # Then what is learnt does not depend on how busy the machine is.
        "staleness.max_lag": "0",
    }
    flags = [flag for key, value in sets.items() for flag in ("--set", f"{key}={value}")]
    config = "examples/guess_number.toml"
    done = launched.headrace("up", "--config", config, "--model", str(tiny_model), "--steps", str(STEPS), *flags)
    assert (done.stderr, done.returncode) == ("", 0)

    steps = [json.loads(line) for line in (launched.run / "steps.jsonl").read_text().splitlines()]
    rewards = [step["reward"] for step in steps if "reward" in step]
    assert len(rewards) == STEPS
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert first < 0.15
    assert last > first + 0.5
    summary = launched.summary()
    assert summary["balance"]["train"]["closed"]
    # Of a range that was never trained on.
    assert summary["accuracy_after"] > summary["accuracy_before"]
    # Games of several turns, with feedback in between.
    shown = [example["after"] for example in summary["examples"]]
    assert any("Higher." in text or "Only a number" in text for text in shown)
