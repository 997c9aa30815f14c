"""Messages to tokens and back: the tokenizer's chat template, applied so that sampled tokens stay as sampled.

Tools are shown and their results are written as the template does it. For a template without tools, a system message
of ours explains them and results are messages of the user (`producers/tool_formats.py`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from broker.messages import Int32
from headrace.errors import ModelError
from producers.chat_template import Template, Tools
from producers.environments.api import Message, ToolCall
from producers.quoting import Quotes
from producers.round_trip import difference
from producers.tool_formats import FORMATS, explained, retold

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class Chat(Protocol):
    """How one policy reads and writes conversations."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """A completion ends with one of these."""
        ...

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> Int32:
        """Tokens of a conversation's beginning, up to where the model answers. `tools` are schemas."""
        ...

    def follow_up(self, messages: Sequence[Message], last_token: int, tools: Tools = ()) -> Int32:
        """Tokens that go between a completion, whose last token was `last_token`, and the next answer.

        `tools` are those of the beginning.
        """
        ...

    def text(self, token_ids_N: Int32) -> str: ...

    def tool_calls(self, token_ids_N: Int32) -> tuple[ToolCall, ...]:
        """The calls in a completion, in order, without ids; those that cannot be read say why in `error`."""
        ...


class TemplateChat:
    """A Hugging Face tokenizer and its chat template; messages are joined by newlines where it has none."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: tuple[int, ...], tool_format: str = "auto"
    ) -> None:
        """`tool_format` is one of `tool_formats.FORMATS`, or "auto" for the one that the template writes."""
        self._tokenizer: Any = tokenizer
        self._stop_token_ids = stop_token_ids
        self._quotes = Quotes(tokenizer)
        self.template = Template(tokenizer, stop_token_ids, tool_format)
        self._compared = False

    @classmethod
    def load(cls, folder: Path, tool_format: str = "auto") -> TemplateChat:
        """Raises ModelError when the folder's tokenizer does not load."""
        from headrace.policy.loading import load_tokenizer

        tokenizer = load_tokenizer(folder)
        return cls(tokenizer, stop_tokens(tokenizer.eos_token_id, folder / "generation_config.json"), tool_format)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stop_token_ids

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> Int32:
        """Raises ModelError when the template takes no such messages, or writes calls in a format that is not known."""
        quotes = self._quotes
        text = self._opening(quotes.quoted(messages), quotes.quoted_tools(tools))
        # Without a template there is one piece.
        return self._told(text, whole=self.template.missing)

    def follow_up(self, messages: Sequence[Message], last_token: int, tools: Tools = ()) -> Int32:
        """Raises ModelError when the template changes what it wrote before, so that no turn can be appended."""
        template = self.template
        native = template.shows_tools and template.shows_results
        messages, tools = self._quotes.quoted(messages), self._quotes.quoted_tools(tools)
        text = template.between(messages if native else retold(messages), tools if native else ())
        self._compare()
        # A completion that stopped by itself already holds the token that ends an answer, or stands in its place.
        ended = last_token in self._stop_token_ids
        tokens = self._told(text.removeprefix(template.closing) if ended else text)
        if len(tokens) and (tokens[0] == last_token or (ended and tokens[0] in self._stop_token_ids)):
            return tokens[1:]
        return tokens

    def text(self, token_ids_N: Int32) -> str:
        return str(self._tokenizer.decode(token_ids_N.tolist(), skip_special_tokens=True))

    def written(self, token_ids_N: Int32) -> str:
        """The text with its special tokens."""
        return str(
            self._tokenizer.decode(token_ids_N.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def tool_calls(self, token_ids_N: Int32) -> tuple[ToolCall, ...]:
        return self.template.format.read(self.written(token_ids_N))

    def tokens(self, text: str, *, whole: bool = False, plain: bool = False) -> Int32:
        """Of a text. `whole`: with what the tokenizer puts around one. `plain`: special tokens in it are text."""
        ids = self._tokenizer(text, add_special_tokens=whole, split_special_tokens=plain)["input_ids"]
        return np.asarray(ids, np.int32)

    def _told(self, text: str, *, whole: bool = False) -> Int32:
        """Tokens of what the template wrote of quoted messages."""
        return np.concatenate(
            [self.tokens(piece, whole=whole, plain=plain) for piece, plain in self._quotes.pieces(text)]
        )

    def _opening(self, messages: Sequence[Message], tools: Tools) -> str:
        """Text up to where the model answers."""
        template = self.template
        if tools and not template.shows_tools:
            return self._explained(messages, tools)
        if tools:
            _ = template.format
        return template.render(messages if template.shows_tools else retold(messages), tools, generate=True)

    def _explained(self, messages: Sequence[Message], tools: Tools) -> str:
        told = explained(retold(messages), tools)
        try:
            return self._opening(told, ())
        except ModelError:
            # Templates without a role for the system take its text from the user.
            system, *rest = told
            if not rest or rest[0].role != "user":
                raise
            return self._opening([Message("user", f"{system.content}\n\n{rest[0].content}"), *rest[1:]], ())

    def _compare(self) -> None:
        """Once, when the first conversation goes on: say whether the template would write it otherwise."""
        if self._compared:
            return
        self._compared = True
        try:
            differs = difference(self)
        except ModelError as error:
            differs = str(error)
        if differs:
            log.warning(
                "rollouts of several turns carry their tokens as they were sampled and shown, which is not what the "
                "chat template writes of a whole conversation: %s",
                differs,
            )


class ByteChat:
    """One token per byte, for engines without a model: 0 ends a message, and no template stands between."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (0,)

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> Int32:
        told = explained(retold(messages), tools) if tools else messages
        return self._tokens("\n".join(message.content for message in told) + "\n")

    def follow_up(self, messages: Sequence[Message], last_token: int, tools: Tools = ()) -> Int32:
        text = "\n".join(message.content for message in retold(messages)) + "\n"
        return self._tokens(text if last_token == 0 else "\0" + text)

    def text(self, token_ids_N: Int32) -> str:
        return bytes(token for token in token_ids_N.tolist() if 0 < token < 256).decode("utf-8", errors="replace")

    def tool_calls(self, token_ids_N: Int32) -> tuple[ToolCall, ...]:
        return FORMATS["hermes"].read(self.text(token_ids_N))

    def _tokens(self, text: str) -> Int32:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def stop_tokens(eos_token_id: int | Sequence[int] | None, generation_config: Path) -> tuple[int, ...]:
    """The tokenizer's end-of-sequence tokens and those of the model's generation_config.json, if it has one.

    Raises ModelError when that file is not JSON.
    """
    found = [eos_token_id]
    if generation_config.is_file():
        try:
            found.append(json.loads(generation_config.read_text(encoding="utf-8")).get("eos_token_id"))
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(f"{generation_config} cannot be read: {error}") from error
    ids: set[int] = set()
    for tokens in found:
        ids.update([] if tokens is None else [tokens] if isinstance(tokens, int) else tokens)
    return tuple(sorted(ids))
