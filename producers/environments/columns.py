"""What a row of a data set is: its columns become messages and an answer."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import EnvironmentLoadError
from headrace.objects import shortened
from producers.environments.api import Message, Observation
from producers.environments.single_turn import SingleTurn

ROLES = ("system", "user", "assistant")
_PLACE = re.compile(r"{{|}}|{([^\W\d][\w. -]*)}")
"""A column's name begins with a letter and has letters, digits, dots, spaces and dashes; other braces are braces."""


class BadRow(Exception):
    """Its text says what is wrong with a row."""


class Shown(SingleTurn):
    """A conversation that the model goes on with once, and what the right answer is."""

    def __init__(self, messages: Sequence[Message], answer: Any) -> None:
        super().__init__(messages[-1].content, answer)
        self._observation = Observation(tuple(messages))


class Columns:
    """Which columns say what. A name with dots goes into columns that are objects: `reward_model.ground_truth`."""

    def __init__(self, prompt: str, messages: str, system: str, answer: str, answer_after: str) -> None:
        """Raises EnvironmentLoadError for a prompt that shows no column, or one beside `messages`."""
        if not messages and not any(found[1] for found in _PLACE.finditer(prompt)):
            raise EnvironmentLoadError(f"dataset: prompt = {prompt!r} names no column, as in '{{question}}'")
        if messages and (prompt != "{prompt}" or system):
            raise EnvironmentLoadError("dataset: messages are shown as they are; leave out prompt and system")
        if answer_after and not answer:
            raise EnvironmentLoadError(f"dataset: answer_after = {answer_after!r} needs the column of the answer")
        self._prompt, self._messages, self._system = prompt, messages, system
        self._answer, self._answer_after = answer, answer_after

    def episode(self, row: Mapping[str, Any]) -> Shown:
        """Raises BadRow."""
        return Shown(self._shown(row), self._right(row))

    def pass_rate(self, row: Mapping[str, Any], column: str) -> float:
        """NaN where the row has none. Raises BadRow."""
        value = _value(row, column)
        if value is None:
            return math.nan
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
            raise BadRow(f"column {column!r} is {_short(value)}, not a pass rate between 0 and 1")
        return float(value)

    def _shown(self, row: Mapping[str, Any]) -> list[Message]:
        if self._messages:
            return _messages(_value(row, self._messages), self._messages)
        shown = [Message("system", self._system)] if self._system else []
        return [*shown, Message("user", _PLACE.sub(lambda found: _filled(found, row), self._prompt))]

    def _right(self, row: Mapping[str, Any]) -> Any:
        if not self._answer:
            return None
        answer = _value(row, self._answer)
        if answer is None:
            raise BadRow(f"column {self._answer!r} has no answer")
        if not self._answer_after:
            return answer
        _, found, after = str(answer).rpartition(self._answer_after)
        if not found or not after.strip():
            raise BadRow(f"column {self._answer!r} has nothing after {self._answer_after!r}: {_short(answer)}")
        return after.strip()


def _filled(found: re.Match[str], row: Mapping[str, Any]) -> str:
    """What stands for `{column}`; doubled braces are braces."""
    if not found[1]:
        return found[0][0]
    value = _value(row, found[1])
    if not isinstance(value, str | int | float) or isinstance(value, bool) or value == "":
        raise BadRow(f"column {found[1]!r} is {_short(value)}, not text or a number")
    return str(value)


def _messages(given: Any, column: str) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise BadRow(f"column {column!r} is {_short(given)}, not a list of messages")
    messages = []
    for message in given:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ROLES or not isinstance(content, str):
            raise BadRow(f"column {column!r} has {_short(message)}, not a message with a role and text")
        messages.append(Message(role, content))
    if messages[-1].role == "assistant":
        raise BadRow(f"column {column!r} ends with a message of the assistant, so that nothing is left to answer")
    return messages


def _value(row: Mapping[str, Any], column: str) -> Any:
    value: Any = row
    for name in (column,) if column in row else column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise BadRow(f"there is no column {column!r}, only {shortened(', '.join(map(str, row)))}")
        value = value[name]
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
