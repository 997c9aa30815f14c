"""Whether a conversation that is carried as tokens is what the chat template writes of it as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from broker.messages import Int32
from producers.environments.api import Message

ANSWERS = {
    "an answer": "It is 4.",
    "an answer that thinks first": "<think>\nTwo and two.\n</think>\n\nIt is 4.",
}
SHOWN_TOKENS = 12


class Renderer(Protocol):
    """What is asked of a chat."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    def prompt(self, messages: Sequence[Message]) -> Int32: ...

    def follow_up(self, messages: Sequence[Message], last_token: int) -> Int32: ...

    def tokens(self, text: str) -> Int32: ...

    def written(self, token_ids_N: Int32) -> str:
        """With special tokens."""
        ...


def difference(chat: Renderer) -> str:
    """What differs, in words, in the first made-up conversation that does not come out the same; empty when all do."""
    for what, answer in ANSWERS.items():
        carried, whole = _both_ways(chat, answer)
        if carried.tolist() != whole.tolist():
            place = _first_difference(carried, whole)
            return (
                f"after {what} the conversation goes on as {_around(chat, carried, place)} where the template "
                f"itself writes {_around(chat, whole, place)}"
            )
    return ""


def _both_ways(chat: Renderer, answer: str) -> tuple[Int32, Int32]:
    """The tokens of one conversation: turn by turn as rollouts carry them, and as a whole."""
    first, second, third = (Message("user", text) for text in ("What is 2 + 2?", "And 3 + 3?", "Thanks!"))
    answers = [Message("assistant", answer), Message("assistant", "6")]
    whole = chat.prompt([first, answers[0], second, answers[1], third])
    begun, end = chat.prompt([first]), _end_of_answer(chat, second)
    before, last = _before_answer(chat, begun, whole, answer), end[-1] if len(end) else -1
    said = [np.concatenate([chat.tokens(before + message.content), end]) for message in answers]
    parts = [begun, said[0], chat.follow_up([second], last), said[1], chat.follow_up([third], last)]
    return np.concatenate(parts), whole


def _before_answer(chat: Renderer, begun: Int32, whole: Int32, answer: str) -> str:
    """White space that the template writes before an answer, which a model of this template samples."""
    opening, text = chat.written(begun), chat.written(whole)
    between = text[len(opening) :].partition(answer)[0] if text.startswith(opening) else ""
    return "" if between.strip() else between


def _end_of_answer(chat: Renderer, following: Message) -> Int32:
    """What a model ends its answer with: what the template writes there, up to a token that it stops at."""
    stop = chat.stop_token_ids[0] if chat.stop_token_ids else -1
    cut, ended = chat.follow_up([following], -1), chat.follow_up([following], stop)
    written = cut[: len(cut) - len(ended)]
    return written if len(written) else np.array(chat.stop_token_ids[:1], np.int32)


def _first_difference(one: Int32, other: Int32) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def _around(chat: Renderer, token_ids: Int32, place: int) -> str:
    start = max(0, place - SHOWN_TOKENS // 3)
    return repr(chat.written(token_ids[start : start + SHOWN_TOKENS]))
