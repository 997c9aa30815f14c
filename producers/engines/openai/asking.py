"""What a completion server is asked for one job."""

from __future__ import annotations

from typing import Any

import xxhash

from producers.engines.remote.job import SEED_BITS, Job

PLAIN: dict[str, Any] = {
    "n": 1,
    "stream": False,
    "echo": False,
    "logprobs": 0,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "add_special_tokens": False,
    "skip_special_tokens": False,
    # Else a server takes these from the model's folder, where that names some.
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    # A stop at a token that is none of ours would be gone on from; one of ours ends it all the same.
    "ignore_eos": True,
}
"""The same in all requests. What a server does not know it passes over, or refuses: that is found out at start."""


def completion_body(job: Job, model: str, rid: str, label: str, *, seeded: bool) -> dict[str, Any]:
    """`label`, where there is one, keeps the prefix cache of its version apart from that of others. `seeded`: whether
    the job's seed goes with it."""
    sampling = job.request.sampling
    body: dict[str, Any] = {
        **PLAIN,
        "model": model,
        "prompt": job.request.prompt_ids_P.tolist() + job.tokens,
        "max_tokens": job.limit - len(job.tokens),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_token_ids),
        "stop": list(sampling.stop),
        "request_id": rid,
    }
    if seeded:
        body["seed"] = job.seed & SEED_BITS
    if label:
        body["cache_salt"] = xxhash.xxh3_128_hexdigest(label.encode())
    return body
