"""What a reward-model service is asked, and how its answer is read: JSON over HTTP, one POST for a batch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.config import RewardConfig
from headrace.objects import shortened
from producers.environments.api import Rollout


class BadAnswer(Exception):
    """Its text says what is wrong with what a service answered."""


@dataclass(frozen=True, slots=True)
class Format:
    key: str
    """A request is one list under this key."""
    item: Callable[[RewardConfig, Rollout], Any]
    """What the list has for a rollout."""
    values: Callable[[Any], Any]
    """Of a decoded answer, what should be a list of numbers. Raises LookupError, TypeError or ValueError."""


def encoded(config: RewardConfig, rollout: Rollout) -> str:
    """One rollout as JSON. Raises TypeError or ValueError for an answer or metadata that JSON does not have."""
    return json.dumps(FORMATS[config.format].item(config, rollout), allow_nan=False)


def request(config: RewardConfig, items: Sequence[str]) -> bytes:
    """The body for rollouts that are encoded already."""
    return f"{json.dumps({FORMATS[config.format].key: []})[:-2]}{', '.join(items)}]}}".encode()


def values_of(config: RewardConfig, answer: bytes, count: int) -> list[Any]:
    """One value for each of `count` rollouts, a number or not. Raises BadAnswer."""
    try:
        values = FORMATS[config.format].values(json.loads(answer))
    except (ValueError, LookupError, TypeError, RecursionError):
        values = None
    if not isinstance(values, list):
        quoted = shortened(repr(answer[:400].decode(errors="replace")))
        raise BadAnswer(f"answered {quoted}, which is not of format {config.format!r}")
    if len(values) != count:
        raise BadAnswer(f"answered {len(values)} rewards for {count} rollouts")
    return values


def _text(config: RewardConfig, rollout: Rollout) -> str:
    # In one pass, because a prompt may hold such marks itself.
    return re.sub(r"\{(prompt|completion)\}", lambda mark: str(getattr(rollout, mark[1])), config.template)


FORMATS = {
    "headrace": Format("rollouts", lambda config, rollout: asdict(rollout), lambda answer: answer["rewards"]),
    # A reward model gives each text an "embedding" of one number.
    "sglang": Format("text", _text, lambda answer: [value for (value,) in (each["embedding"] for each in answer)]),
}
"""By `RewardConfig.format`."""
