"""An engine that says what a test wants, in a chat of any tokenizer."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from broker.messages import VersionSpan
from headrace.config import EnvironmentConfig, SamplingConfig
from producers.chat import ByteChat, TemplateChat
from producers.engines.api import Completion, Request
from producers.engines.scripted import ScriptedEngine
from producers.environments.calls import Calls
from producers.rollout import Player
from tests.rollouts import FIRST

Say = Callable[[str], str]
"""From the whole conversation so far, special tokens included, to an answer without its end."""


class Replies(ScriptedEngine):
    """Ends each answer with the chat's first stop token, unless `max_new_tokens` cuts it."""

    def __init__(self, chat: ByteChat | TemplateChat, say: Say, context_length: int = 4096) -> None:
        super().__init__(context_length=context_length)
        self._chat, self._say = chat, say
        self.asked: list[Request] = []

    async def generate(self, request: Request) -> Completion:
        self.asked.append(request)
        shown = request.prompt_ids_P
        answer = self._say(self._chat.text(shown) if isinstance(self._chat, ByteChat) else self._chat.written(shown))
        whole = np.append(self._ids(answer), self._chat.stop_token_ids[0]).astype(np.int32)[
            : request.sampling.max_new_tokens
        ]
        return Completion(
            request_id=request.request_id,
            token_ids_N=whole,
            logprobs_N=np.full(len(whole), -math.log(2), np.float32),
            spans=(VersionSpan(0, len(whole), FIRST),),
            finish_reason="stop" if whole[-1] in self._chat.stop_token_ids else "length",
            queue_s=0.0,
            decode_s=0.0,
        )

    def _ids(self, text: str) -> np.ndarray:  # type: ignore[type-arg]
        return np.frombuffer(text.encode(), np.uint8) if isinstance(self._chat, ByteChat) else self._chat.tokens(text)


def player_of(
    say: Say,
    chat: ByteChat | TemplateChat | None = None,
    deadline_s: float = 5.0,
    context_length: int = 4096,
    **limits: int,
) -> tuple[Player, Replies]:
    """A player in whose engine `say` speaks, with limits for environment "chatty"."""
    chat = chat or ByteChat()
    engine = Replies(chat, say, context_length)
    entries = {"chatty": EnvironmentConfig(name="chatty", **limits)}
    return Player(engine, chat, SamplingConfig(max_new_tokens=1000), Calls(deadline_s), entries), engine
