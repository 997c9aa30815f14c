"""The random numbers of one request."""

from __future__ import annotations

import xxhash

from producers.engines.api import Request


def request_seed(request: Request, engine_seed: int) -> int:
    """64 bits: the request's own seed where it has one, else one of the engine's seed and the request's id."""
    own = request.sampling.seed
    text = f"engine {engine_seed} {request.request_id}" if own is None else f"request {own}"
    return xxhash.xxh3_64_intdigest(text.encode())
