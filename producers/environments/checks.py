"""What environments gave, looked at before it is used: they are somebody's own code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from headrace.objects import reason
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
    if not given.messages:
        raise RolloutFailed("environment gave an Observation without messages, which leaves nothing to answer")
    if not isinstance(given.tools, tuple | list) or not all(isinstance(tool, Mapping) for tool in given.tools):
        raise RolloutFailed("environment gave an Observation whose tools are not a tuple of schemas")
    _check_json("messages", lambda: [_fields(message) for message in given.messages])
    _check_json("tools", lambda: [dict(tool) for tool in given.tools])
    _check_reward(given.reward, first=first)
    return given


def _fields(message: Message) -> list[object]:
    """What a chat template may write."""
    calls = [(call.name, dict(call.arguments)) for call in message.tool_calls]
    return [message.role, message.content, message.tool_call_id, message.name, calls]


def _check_json(what: str, given: Callable[[], object]) -> None:
    try:
        json.dumps(given(), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RolloutFailed(
            "environment gave an Observation whose text is not Unicode: it has half a surrogate pair"
        ) from None
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise RolloutFailed(f"environment gave an Observation whose {what} are not JSON ({reason(error)})") from error


def _check_reward(given: object, *, first: bool) -> None:
    reward = _number(given)
    # NaN is not below anything.
    if reward is None or not abs(reward) <= LARGEST_REWARD:
        told = f"of type {type(given).__name__}" if reward is None else repr(reward)
        raise RolloutFailed(
            f"environment gave an Observation with reward {told}, not a number up to {LARGEST_REWARD:g}"
        )
    if first and reward:
        raise RolloutFailed(f"environment gave its first Observation reward {reward!r}, but there is no turn before it")


def _number(given: object) -> float | None:
    """That of any library; None for what is none."""
    if not hasattr(given, "__float__"):
        return None
    try:
        return float(given)
    except (TypeError, ValueError, OverflowError):
        return None
