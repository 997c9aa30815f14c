"""Versions for the SGLang servers of tests/sglang/, and what the same model computes by itself with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace.policy.loading import layout_of
from headrace.version import PolicyVersion
from producers.engines.remote.answers import Generated
from producers.engines.remote.staged import Staged
from producers.engines.sglang.client import SglangClient
from tests.remote_engines import fill, scored
from tests.tiny import tiny_llama
from weightsync.manifest import Layout

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

PROMPT = [72, 101, 108, 108, 111, 32, 116, 104, 101, 114, 101]
ROOM = ("--mem-fraction-static", "0.5")
"""For a server of one's own: what it takes is bounded by its tokens, but it looks at all that others take meanwhile."""
CLOSE = 2e-4
"""Log-probs of two programs that compute in float32; seen: 2e-5."""


@cache
def model_of(seed: int, dtype: str = "float32") -> LlamaForCausalLM:
    """Whose weights are that version's, rounded to the wire's dtype, in float32. Not to be changed."""
    import torch

    model = tiny_llama(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms begin as ones in any version.
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.01
            parameter.copy_((parameter + noise).to(getattr(torch, dtype)).float())
    return model


def tiny_layout(dtype: str = "float32") -> Layout:
    return Layout.of(layout_of(tiny_llama(), dtype))


def stage(staged: Staged, seed: int) -> PolicyVersion:
    """Put that version into it and seal it."""
    fill(staged.buffer, staged.layout, model_of(seed, staged.layout.tensors[0].dtype))
    version = PolicyVersion(1, seed)
    staged.seal(version)
    return version


def body(count: int, rid: str, prompt: Sequence[int] = PROMPT, temperature: float = 0.0) -> dict[str, object]:
    """Of a request for so many tokens."""
    sampling = {"max_new_tokens": count, "temperature": temperature, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True, "rid": rid}


async def assert_serves(client: SglangClient, seed: int, dtype: str = "float32", rid: str = "check") -> None:
    """It decodes greedily with exactly that version's weights, and nothing of an older one is in its cache."""
    import torch

    answer = await client.generate(body(12, rid))
    tokens = answer.output_ids
    logprobs = logprobs_of(answer)
    expected = scored(model_of(seed, dtype), PROMPT, tokens)
    assert np.abs(logprobs - expected).max() < CLOSE
    with torch.no_grad():
        logits = model_of(seed, dtype)(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    best = logits.log_softmax(-1).max(-1).values.numpy()
    assert np.abs(best - expected).max() < CLOSE, "it is not the greedy one of these weights"


def logprobs_of(answer: Generated) -> np.ndarray:
    found = answer.meta_info.output_token_logprobs
    assert found is not None
    assert [token for _, token, _ in found] == answer.output_ids
    return np.array([value for value, _, _ in found], np.float32)


@asynccontextmanager
async def decoding(client: SglangClient, count: int, tokens: int) -> AsyncIterator[list[asyncio.Task[Generated]]]:
    """So many requests of so many tokens each are under way, all of them with a first token."""
    requests = [
        asyncio.ensure_future(client.generate(body(tokens, f"long-{at}", [*PROMPT, at], 1.0))) for at in range(count)
    ]
    try:
        await running(client, count)
        yield requests
    finally:
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)


async def running(client: SglangClient, count: int) -> None:
    """Until the server decodes so many requests."""
    for _ in range(600):
        if (await client.loads()).total().running >= count:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{count} requests never ran at once")


async def goes_on(client: SglangClient, tokens: int = 8) -> None:
    """Until so many more tokens are in the cache of a server that decodes."""
    before = (await client.loads()).total().used_tokens
    for _ in range(600):
        if (await client.loads()).total().used_tokens >= before + tokens:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it does not decode")


def fresh(folder: Path, model: Path, dtype: str = "float32") -> Staged:
    return Staged(tiny_layout(dtype), model, "tests", folder)


def renamed(staged: Staged, name: str, other: str) -> None:
    """In the sealed file only: to a server one tensor is missing, and there is one that it does not know."""
    patched(staged, f'"{name}"'.encode(), f'"{other}"'.encode())


def patched(staged: Staged, before: bytes, after: bytes) -> None:
    """In the header of the sealed file, which stays as long as it is."""
    with staged.file.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length)
        assert header.count(before) == 1
        changed = header.replace(before, after).rstrip().ljust(length)
        assert len(changed) == length
        file.seek(8)
        file.write(changed)
