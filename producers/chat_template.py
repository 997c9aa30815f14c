"""A tokenizer's chat template as text: what it writes of messages and tools, and what between two answers."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from headrace.errors import ModelError
from headrace.objects import reason
from producers.environments.api import Message
from producers.tool_formats import FORMATS, PROBE, PROBE_TOOL, Format, learned, writes_calls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]]
"""Schemas of tools, as chat templates take them."""

_USER, _ASSISTANT, _RESULT = (f"headrace-{secrets.token_hex(8)}" for _ in range(3))
"""Contents of made-up conversations that show what the template puts around them: words that no message has."""


class Template:
    """What one template can do is found out by rendering, once. Messages are joined by newlines where there is none."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: tuple[int, ...], tool_format: str = "auto"
    ) -> None:
        """`tool_format` is one of `tool_formats.FORMATS`, or "auto" for the one that the template writes."""
        self._tokenizer: Any = tokenizer
        self._stop_token_ids = stop_token_ids
        self._tool_format = tool_format

    @property
    def missing(self) -> bool:
        return self._tokenizer.chat_template is None

    def render(self, messages: Sequence[Message], tools: Tools = (), *, generate: bool) -> str:
        """The text of a conversation; `generate` adds what a new answer begins with. Raises ModelError."""
        if self.missing:
            return "\n".join(message.content for message in messages)
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

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template writes the tools that it is given."""
        if self.missing:
            return False
        try:
            return PROBE.name in self.render([Message("user", _USER)], (PROBE_TOOL,), generate=True)
        except ModelError:
            return False

    @cached_property
    def shows_results(self) -> bool:
        """Whether it writes the result of a tool, as a message of its own."""
        try:
            return _RESULT in self.between([Message("tool", _RESULT, (), PROBE.call_id, PROBE.name)], (PROBE_TOOL,))
        except ModelError:
            return False

    @cached_property
    def closing(self) -> str:
        """What it writes between an answer and the token that ends it, which a model samples before that token."""
        try:
            answered = self.between([])
            return answered[: len(answered) - len(self._from_stop(answered))]
        except ModelError:
            return ""

    @cached_property
    def format(self) -> Format:
        """How the model writes calls. Raises ModelError when the template's format is not known."""
        if self._tool_format != "auto":
            return FORMATS[self._tool_format]
        if not self.shows_tools:
            return FORMATS["hermes"]

        def render(messages: Sequence[Message]) -> str:
            return self.render(messages, (PROBE_TOOL,), generate=False)

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

    def between(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """From the end of an answer, over these messages, to where the model answers again.

        Raises ModelError when the template changes what it wrote before, so that no turn can be appended.
        """
        if self.missing:
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
        begun = self.render([user], tools, generate=True)
        continued = self.render([user, answer, *messages], tools, generate=bool(messages))
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
