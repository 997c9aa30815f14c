"""Messages to tokens and back: the tokenizer's chat template, applied so that sampled tokens stay as sampled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from broker.messages import Int32
from headrace.errors import ModelError
from headrace.objects import reason
from producers.environments.api import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_USER, _ASSISTANT = "headrace-user", "headrace-assistant"
"""Contents of a made-up conversation that shows what the template puts after an answer."""


class Chat(Protocol):
    """How one policy reads and writes conversations."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """A completion ends with one of these."""
        ...

    def prompt(self, messages: Sequence[Message]) -> Int32:
        """Tokens of a conversation's beginning, up to where the model answers."""
        ...

    def follow_up(self, messages: Sequence[Message], last_token: int) -> Int32:
        """Tokens that go between a completion, whose last token was `last_token`, and the next answer."""
        ...

    def text(self, token_ids_N: Int32) -> str: ...


class TemplateChat:
    """A Hugging Face tokenizer and its chat template; messages are joined by newlines where it has none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: tuple[int, ...]) -> None:
        self._tokenizer: Any = tokenizer
        self._stop_token_ids = stop_token_ids

    @classmethod
    def load(cls, folder: Path) -> TemplateChat:
        """Raises ModelError when the folder's tokenizer does not load."""
        from headrace.policy.loading import load_tokenizer

        tokenizer = load_tokenizer(folder)
        return cls(tokenizer, stop_tokens(tokenizer.eos_token_id, folder / "generation_config.json"))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stop_token_ids

    def prompt(self, messages: Sequence[Message]) -> Int32:
        if self._tokenizer.chat_template is None:
            return self._tokens("\n".join(message.content for message in messages), special=True)
        return self._tokens(self._render(messages, generate=True), special=False)

    def follow_up(self, messages: Sequence[Message], last_token: int) -> Int32:
        """Raises ModelError when the template changes what it wrote before, so that no turn can be appended."""
        tokens = self._tokens(self._between(messages), special=False)
        # A completion that stopped by itself already holds the token that ends an answer.
        return tokens[1:] if len(tokens) and tokens[0] == last_token else tokens

    def text(self, token_ids_N: Int32) -> str:
        return str(self._tokenizer.decode(token_ids_N.tolist(), skip_special_tokens=True))

    def _between(self, messages: Sequence[Message]) -> str:
        if self._tokenizer.chat_template is None:
            return "\n" + "\n".join(message.content for message in messages) + "\n"
        before = [Message("user", _USER), Message("assistant", _ASSISTANT)]
        answered = self._render(before, generate=False)
        continued = self._render([*before, *messages], generate=True)
        end_of_answer = answered.rfind(_ASSISTANT) + len(_ASSISTANT)
        if _ASSISTANT not in answered or not continued.startswith(answered[:end_of_answer]):
            raise ModelError("the chat template rewrites earlier messages, so that a conversation cannot be continued")
        return continued[end_of_answer:]

    def _render(self, messages: Sequence[Message], *, generate: bool) -> str:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generate)
        except Exception as error:
            # A template is a program: it raises what it likes, a division by zero as well as its own refusal.
            roles = ", ".join(message.role for message in messages)
            raise ModelError(f"the chat template does not take messages of {roles} ({reason(error)})") from error
        return str(text)

    def _tokens(self, text: str, *, special: bool) -> Int32:
        ids = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return np.asarray(ids, np.int32)


class ByteChat:
    """One token per byte, for engines without a model: 0 ends a message, and no template stands between."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (0,)

    def prompt(self, messages: Sequence[Message]) -> Int32:
        return self._tokens("\n".join(message.content for message in messages) + "\n")

    def follow_up(self, messages: Sequence[Message], last_token: int) -> Int32:
        text = "\n".join(message.content for message in messages) + "\n"
        return self._tokens(text if last_token == 0 else "\0" + text)

    def text(self, token_ids_N: Int32) -> str:
        return bytes(token for token in token_ids_N.tolist() if 0 < token < 256).decode("utf-8", errors="replace")

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
