"""What a server answers to one request, in the form in which jobs add up: that of SGLang's /generate.

Fields that a server's version lacks have defaults; answers of other servers are put into this form.
"""

from __future__ import annotations

from typing import Any

import msgspec


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
    """Why it was aborted, where the server says so."""


class Meta(msgspec.Struct, frozen=True):
    finish_reason: Finish | None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were in the cache already."""
    weight_versions: list[VersionReport] | None = None
    num_retractions: int = 0
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    """Under the model's distribution at the temperature, before top-k and top-p."""
    output_token_sampling_logprobs: list[float | None] | None = None
    """Under the distribution that was sampled from; only where it was asked for."""


class Generated(msgspec.Struct, frozen=True):
    """N sampled tokens, from the first on."""

    output_ids: list[int]
    meta_info: Meta
