"""What an SGLang server is asked for one job."""

from __future__ import annotations

from typing import Any

from producers.engines.remote.job import SEED_BITS, Job


def generate_body(job: Job, rid: str, label: str, *, seeded: bool) -> dict[str, Any]:
    """`label` keeps the prefix cache of its version apart from that of others. `seeded`: whether the job's seed goes
    with it."""
    sampling = job.request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": job.limit - len(job.tokens),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": list(sampling.stop_token_ids),
        "stop": list(sampling.stop),
        # It would ignore our stop tokens, too; a stop at another is gone on from.
        "ignore_eos": not sampling.stop_token_ids,
        "skip_special_tokens": False,
    }
    if seeded:
        params["sampling_seed"] = job.seed & SEED_BITS
    asked = {"rid": rid, "sampling_params": params, "return_logprob": True, "extra_key": label}
    if job.filtered:
        asked["return_sampling_mask"] = True
    return {"input_ids": job.request.prompt_ids_P.tolist() + job.tokens, **asked}
