"""Special tokens in the texts of a conversation are text: what a user or a tool says ends no turn and begins none.

A chat template mixes such texts with special tokens of its own. So while it writes, those that stand in a text are
quoted: a word of letters and digits stands for each. Then the template's own become tokens, and a piece of text between
two of them that has such a word in it is tokenised by itself, with all that stands there as text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from producers.environments.api import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Quotes:
    """Of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        special = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        self._special = sorted({token for token in special if token}, key=lambda token: (-len(token), token))
        """The longest first, as one may begin with another."""
        self._find = re.compile("|".join(map(re.escape, self._special)) or r"(?!)")
        # Nobody can write it without having seen it, and it is never shown.
        self._mark = f"quote{secrets.token_hex(8)}n"
        self._quoted = re.compile(rf"{self._mark}(\d+)e")

    def quoted(self, messages: Sequence[Message]) -> list[Message]:
        """The same messages, with a word for each special token in their texts."""
        return [
            replace(
                message,
                content=self._quote(message.content),
                name=self._quote(message.name),
                tool_calls=tuple(
                    replace(call, name=self._quote(call.name), arguments=_mapped(call.arguments, self._quote))
                    for call in message.tool_calls
                ),
            )
            for message in messages
        ]

    def quoted_tools(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The same schemas, likewise."""
        return [_mapped(tool, self._quote) for tool in tools]

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """What a template wrote of quoted messages, in order: text, and whether all of it is text, special tokens too.

        At least one, and no more than one where there are no quotes, or no special tokens of the template's own.
        """
        begin = place = 0
        for end, after in [*(found.span() for found in self._find.finditer(text)), (len(text), len(text))]:
            if self._mark in text[place:end]:
                if begin < place:
                    yield text[begin:place], False
                yield self._unquoted(text[place:end]), True
                begin = end
            place = after
        if begin < len(text) or not text:
            yield text[begin:], False

    def _quote(self, text: str) -> str:
        return self._find.sub(lambda found: f"{self._mark}{self._special.index(found[0])}e", text)

    def _unquoted(self, text: str) -> str:
        return self._quoted.sub(lambda found: self._special[int(found[1])], text)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """JSON with all its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            change(name) if isinstance(name, str) else name: _mapped(inner, change) for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_mapped(inner, change) for inner in value]
    return value
