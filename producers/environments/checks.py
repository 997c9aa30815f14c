"""What environments gave, looked at before it is used: they are somebody's own code."""

from __future__ import annotations

import math
from collections.abc import Mapping

from producers.environments.api import Done, Message, Observation
from producers.environments.calls import RolloutFailed

LARGEST_REWARD = 1e12
"""Of one turn, so that no sum of them is infinite."""


def checked_answer(given: object) -> Observation | Done:
    """What followed a turn. Raises RolloutFailed."""
    return given if isinstance(given, Done) else checked_observation(given)


def checked_observation(given: object, *, first: bool = False) -> Observation:
    """What an environment gave, if it can be shown. Raises RolloutFailed."""
    if not isinstance(given, Observation):
        raise RolloutFailed(f"environment gave {type(given).__name__} where an Observation belongs")
    texts = given.messages if isinstance(given.messages, tuple | list) else (None,)
    if not all(isinstance(message, Message) and isinstance(message.content, str) for message in texts):
        raise RolloutFailed("environment gave an Observation whose messages are not Messages with text")
    if any("\ud800" <= letter <= "\udfff" for message in given.messages for letter in message.content):
        raise RolloutFailed("environment gave an Observation whose text is not Unicode: it has half a surrogate pair")
    if not isinstance(given.tools, tuple | list) or not all(isinstance(tool, Mapping) for tool in given.tools):
        raise RolloutFailed("environment gave an Observation whose tools are not a tuple of schemas")
    _check_reward(given.reward, first=first)
    return given


def _check_reward(reward: object, *, first: bool) -> None:
    if not isinstance(reward, int | float) or not math.isfinite(reward) or abs(reward) > LARGEST_REWARD:
        raise RolloutFailed(
            f"environment gave an Observation with reward {reward!r}, not a number up to {LARGEST_REWARD:g}"
        )
    if first and reward:
        raise RolloutFailed(f"environment gave its first Observation reward {reward!r}, but there is no turn before it")
