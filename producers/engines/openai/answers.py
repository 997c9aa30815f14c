"""What a completion server answers, as far as this engine reads it.

Token ids come from `token_ids` (vLLM's `return_token_ids`), from the names of the tokens beside their log-probs
(`return_tokens_as_token_ids`: "token_id:17"), or from both, and then must agree. Text is never read.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from producers.engines.remote.answers import Finish, Generated, Meta
from producers.engines.remote.http import ServerBroken

TOKEN_NAME = "token_id:"  # noqa: S105 - no secret
LOWEST = -9999.0
"""What a server writes for a log-prob that JSON has no number for."""


class Logprobs(msgspec.Struct, frozen=True):
    """Of N sampled tokens."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class Choice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None
    """"stop", "length", "abort", or what else a server has."""
    stop_reason: int | str | None = None
    """The stop token or string that ended it; None is also the model's own end token."""
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: Logprobs | None = None

    def ids(self) -> list[int] | None:
        """The sampled tokens; None where the server does not tell them. Raises ServerBroken."""
        named = named_ids(self.logprobs.tokens) if self.logprobs is not None else None
        if self.token_ids is None or named is None:
            return named if self.token_ids is None else self.token_ids
        if named != self.token_ids:
            raise ServerBroken(f"an answer has {len(self.token_ids)} token ids and log-probs of {len(named)} others")
        return self.token_ids


class Cached(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    prompt_tokens_details: Cached | None = None

    @property
    def cached(self) -> int:
        """Prompt tokens that were in the cache already, where the server tells."""
        return (self.prompt_tokens_details.cached_tokens or 0) if self.prompt_tokens_details is not None else 0


class Completed(msgspec.Struct, frozen=True):
    """The answer of /v1/completions to one prompt."""

    choices: list[Choice]
    usage: Usage | None = None

    @property
    def choice(self) -> Choice:
        """The only one. Raises ServerBroken."""
        if len(self.choices) != 1:
            raise ServerBroken(f"an answer has {len(self.choices)} choices where one was asked for")
        return self.choices[0]


class Model(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None
    """Prompt and completion together."""


class Models(msgspec.Struct, frozen=True):
    """The answer of /v1/models."""

    data: list[Model]


completed_decoder = msgspec.json.Decoder(Completed)
models_decoder = msgspec.json.Decoder(Models)


def named_ids(names: Sequence[str]) -> list[int] | None:
    """The ids of tokens named "token_id:17"; None where one is named otherwise, or no number of 64 bits."""
    numbers = [name.removeprefix(TOKEN_NAME) for name in names]
    if not all(
        name.startswith(TOKEN_NAME) and number.isdecimal() and len(number) < 19
        for name, number in zip(names, numbers, strict=True)
    ):
        return None
    return [int(number) for number in numbers]


def generated(answer: Completed) -> Generated:
    """The same in the terms in which jobs add up. Raises ServerBroken for an answer that does not add up."""
    choice, usage = answer.choice, answer.usage or Usage()
    ids = choice.ids()
    logprobs = choice.logprobs.token_logprobs if choice.logprobs is not None else []
    if ids is None:
        raise ServerBroken("an answer has no token ids")
    if len(logprobs) != len(ids):
        raise ServerBroken(f"an answer has {len(ids)} token ids and {len(logprobs)} log-probs")
    known = [None if logprob is None or logprob <= LOWEST else logprob for logprob in logprobs]
    meta = Meta(
        finish_reason=None if choice.finish_reason is None else Finish(choice.finish_reason, choice.stop_reason),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached,
        output_token_logprobs=[(logprob, token, None) for logprob, token in zip(known, ids, strict=True)],
        # Whether they are those of the distribution that was sampled from was asked at start.
        output_token_sampling_logprobs=known,
    )
    return Generated(ids, meta)
