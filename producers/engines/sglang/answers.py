"""What an SGLang server answers, as far as this engine reads it. Fields that a version lacks have defaults."""

from __future__ import annotations

from typing import Any

import msgspec

from producers.engines.sglang.refill import Load


class VersionReport(msgspec.Struct, frozen=True):
    """Output tokens `start` to `end` were sampled under this label."""

    version: str
    start: int
    end: int


class Finish(msgspec.Struct, frozen=True):
    type: str
    """"stop", "length" or "abort"."""
    matched: int | str | list[int] | None = None
    """What ended a "stop": a token, or a string."""
    message: str | None = None


class Meta(msgspec.Struct, frozen=True):
    finish_reason: Finish | None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were in the cache already."""
    weight_version: str | None = None
    weight_versions: list[VersionReport] | None = None
    num_retractions: int = 0
    queue_time: float | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    """Under the model's distribution at the temperature, before top-k and top-p."""
    output_token_sampling_logprobs: list[float] | None = None
    """Under the distribution that was sampled from; only where it was asked for."""


class Generated(msgspec.Struct, frozen=True):
    """The answer of /generate, or one event of it: N sampled tokens, from the first on."""

    output_ids: list[int]
    meta_info: Meta


class _RankLoad(msgspec.Struct, frozen=True):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0
    max_running_requests: int = 0


class Loads(msgspec.Struct, frozen=True):
    """The answer of /v1/loads: one entry per data-parallel rank."""

    loads: list[_RankLoad]

    def total(self, retractions: int = 0) -> Load:
        return Load(
            running=sum(rank.num_running_reqs for rank in self.loads),
            queued=sum(rank.num_waiting_reqs for rank in self.loads),
            used_tokens=sum(rank.num_used_tokens for rank in self.loads),
            capacity_tokens=sum(rank.max_total_num_tokens for rank in self.loads),
            max_running=sum(rank.max_running_requests for rank in self.loads),
            retractions=retractions,
        )


generated_decoder = msgspec.json.Decoder(Generated)
loads_decoder = msgspec.json.Decoder(Loads)
