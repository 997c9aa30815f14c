"""A receiver that follows a training by deltas alone has the trainer's bits after every step."""

from __future__ import annotations

import torch

from tests.tiny import VOCABULARY, tiny_llama
from weightsync import codecs
from weightsync.manifest import DTYPE_BYTES
from weightsync.placement import Bytes

STEPS = 200


def bits(model: torch.nn.Module, dtype: str) -> Bytes:
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return flat.to(getattr(torch, dtype)).view(torch.uint8).numpy()


def test_two_hundred_steps() -> None:
    model = tiny_llama(hidden_size=32, intermediate_size=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    followers = {(name, dtype): bits(model, dtype).copy() for name in codecs.CODECS for dtype in DTYPE_BYTES}
    sent = dict.fromkeys(followers, 0)
    before = {dtype: bits(model, dtype).copy() for dtype in DTYPE_BYTES}
    random = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (2, 12), generator=random)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after = {dtype: bits(model, dtype).copy() for dtype in DTYPE_BYTES}
        for (name, dtype), follower in followers.items():
            payload = codecs.get(name).encode(before[dtype], after[dtype], dtype)
            codecs.get(name).decode(payload, follower, dtype)
            sent[name, dtype] += len(payload)
            assert follower.tobytes() == after[dtype].tobytes(), f"{name} of {dtype} at step {step}"
        before = after
    assert sent["sparse-ulp", "bfloat16"] < sent["sparse-abs", "bfloat16"] < sent["raw", "bfloat16"]
