"""Messages to tokens and back: the tokenizer's chat template, applied so that sampled tokens stay as sampled.

Tools are shown and their results are written as the template does it. For a template without tools, a system message
of ours explains them and results are messages of the user (`producers/tool_formats.py`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from broker.messages import Int32
from headrace.errors import ModelError
from headrace.objects import reason
from producers.environments.api import Message, ToolCall
from producers.round_trip import difference
from producers.tool_formats import (
    FORMATS,
    PROBE,
    PROBE_TOOL,
    ToolFormat,
    explained,
    learned,
    retold,
    writes_calls,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Tools = Sequence[Mapping[str, Any]]
"""Schemas of tools, as chat templates take them."""

_USER, _ASSISTANT = "headrace-user", "headrace-assistant"
"""Contents of a made-up conversation that shows what the template puts after an answer."""


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
        self._tool_format = tool_format
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
        if tools and not self._shows_tools:
            return self._explained_prompt(messages, tools)
        if tools:
            _ = self._format
        told = messages if self._shows_tools else retold(messages)
        if self._tokenizer.chat_template is None:
            return self.tokens("\n".join(message.content for message in told), special=True)
        return self.tokens(self._render(told, tools, generate=True))

    def follow_up(self, messages: Sequence[Message], last_token: int, tools: Tools = ()) -> Int32:
        """Raises ModelError when the template changes what it wrote before, so that no turn can be appended."""
        native = self._shows_tools
        tokens = self.tokens(self._between(messages, tools) if native else self._between(retold(messages)))
        self._compare()
        # A completion that stopped by itself already holds the token that ends an answer, or stands in its place.
        ended = last_token in self._stop_token_ids
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
        return self._format.read(self.written(token_ids_N))

    def tokens(self, text: str, *, special: bool = False) -> Int32:
        """Of a text; `special` adds what the tokenizer puts around a text of its own."""
        ids = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return np.asarray(ids, np.int32)

    @cached_property
    def _shows_tools(self) -> bool:
        """Whether the template writes the tools that it is given."""
        if self._tokenizer.chat_template is None:
            return False
        try:
            return PROBE.name in self._render([Message("user", _USER)], (PROBE_TOOL,), generate=True)
        except ModelError:
            return False

    @cached_property
    def _format(self) -> ToolFormat:
        if self._tool_format != "auto":
            return FORMATS[self._tool_format]
        if not self._shows_tools:
            return FORMATS["hermes"]

        def render(messages: Sequence[Message]) -> str:
            return self._render(messages, (PROBE_TOOL,), generate=False)

        try:
            found = learned(render, _USER)
            unknown = found is None and writes_calls(render, _USER)
        except ModelError:
            found, unknown = None, True
        if unknown:
            raise ModelError(
                "the chat template writes tool calls in a format that is not known; name the one that the model was "
                f"trained on as model.tool_format ({', '.join(FORMATS)})"
            )
        return found or FORMATS["hermes"]

    def _explained_prompt(self, messages: Sequence[Message], tools: Tools) -> Int32:
        told = explained(retold(messages), tools)
        try:
            return self.prompt(told)
        except ModelError:
            # Templates without a role for the system take its text from the user.
            system, *rest = told
            if not rest or rest[0].role != "user":
                raise
            return self.prompt([Message("user", f"{system.content}\n\n{rest[0].content}"), *rest[1:]])

    def _between(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        if self._tokenizer.chat_template is None:
            return "\n" + "\n".join(message.content for message in messages) + "\n"
        if messages and messages[0].role == "tool":
            # Some templates take results only after calls.
            with suppress(ModelError):
                return self._after_answer(Message("assistant", "", (PROBE,)), PROBE.name, messages, tools)
        return self._after_answer(Message("assistant", _ASSISTANT), _ASSISTANT, messages, tools)

    def _after_answer(self, answer: Message, mark: str, messages: Sequence[Message], tools: Tools) -> str:
        """What the template writes from the end of `answer`, which `mark` stands in, to where the model answers again.

        The conversation before is there as tokens. What counts is that the template leaves it alone up to the answer.
        """
        user = Message("user", _USER)
        begun = self._render([user], tools, generate=True)
        continued = self._render([user, answer, *messages], tools, generate=True)
        head, place = begun.partition(_USER)[0], continued.rfind(mark)
        if place < 0 or not continued.startswith(f"{head}{_USER}") or continued.find(mark, len(head)) != place:
            raise ModelError("the chat template rewrites earlier messages, so that a conversation cannot be continued")
        rest = continued[place + len(mark) :]
        return self._from_stop(rest) if answer.tool_calls else rest

    def _from_stop(self, text: str) -> str:
        """From the first token that ends an answer. Raises ModelError where there is none."""
        stops = [self._tokenizer.decode([token]) for token in self._stop_token_ids]
        found = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
        if not found:
            raise ModelError("the chat template does not end a message with calls")
        return text[min(found) :]

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

    def _render(self, messages: Sequence[Message], tools: Tools = (), *, generate: bool) -> str:
        try:
            turns = [_fields(message) for message in messages]
            given = [dict(tool) for tool in tools] or None
            text = self._tokenizer.apply_chat_template(
                turns, tools=given, tokenize=False, add_generation_prompt=generate
            )
        except Exception as error:
            # A template is a program: it raises what it likes, a division by zero as well as its own refusal.
            roles = ", ".join(message.role for message in messages)
            raise ModelError(f"the chat template does not take messages of {roles} ({reason(error)})") from error
        return str(text)


def _fields(message: Message) -> dict[str, Any]:
    """A message as chat templates know it."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.name:
        fields["name"] = message.name
    return fields


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
