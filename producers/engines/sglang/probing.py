"""Whether a server gives what training needs: asked at start, with one token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import EngineError
from producers.engines.remote.spans import Kv
from producers.engines.sglang.client import ServerRefused, SglangClient

LARGEST_TOP_K = 4095
"""What a server names the support of, by default; one less than its bound, which equal probabilities may reach."""
PROBE_S = 300.0
"""The first request may compile kernels."""


def sampling_fault(temperature: float, top_p: float, top_k: int) -> str | None:
    """Why requests with these values cannot be sampled, or None.

    A server names the log-probs after top-k and top-p only for a support that top-k bounds.
    """
    if temperature == 0 or (top_p >= 1 and top_k == 0):
        return None
    if top_k == 0:
        return (
            f"sampling.top_p = {top_p:g} without sampling.top_k: SGLang tells behaviour log-probs after top-p only "
            f"together with a top-k; set sampling.top_k to at most {LARGEST_TOP_K}, or sampling.top_p to 1"
        )
    if top_k > LARGEST_TOP_K:
        return f"sampling.top_k = {top_k}: SGLang tells behaviour log-probs up to {LARGEST_TOP_K}; lower it, or set 0"
    return None


async def probe(client: SglangClient, info: Mapping[str, Any], kv: Kv) -> None:
    """Raises EngineError with what is missing, and the way out."""
    version = info.get("version") or "of an unknown version"
    body = {
        "input_ids": [1, 2],
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "extra_key": "headrace-probe",
    }
    try:
        got = await client.generate(body, timeout_s=PROBE_S)
    except ServerRefused as error:
        raise EngineError(f"{client.url} (SGLang {version}) refuses what training asks for: {error}") from error
    if not got.output_ids or len(got.meta_info.output_token_logprobs or ()) != len(got.output_ids):
        raise EngineError(
            f"{client.url} (SGLang {version}) returns no token ids with log-probs; it must be 0.5.6 or newer"
        )
    if got.meta_info.weight_versions is None and kv != "resume":
        raise EngineError(
            f"{client.url} (SGLang {version}) does not tell which version sampled which token, as 0.5.20 and newer do; "
            'with it set producer.engine_options.kv = "resume"'
        )
