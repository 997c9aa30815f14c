"""Consecutive weight versions of a real training: a small Llama on the standard library's sources, byte by byte.

The random model is first trained until its weights have the scale of trained ones, then goes on with a fresh AdamW at a
learning rate of reinforcement learning. The same machine makes the same bits every time; about a minute on one core.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 20
LEARNING_RATE = 1e-6
ADAM_BETAS = (0.9, 0.95)
"""As the trainer has it by default."""

_PRETRAINING_STEPS, _PRETRAINING_RATE, _WARM_UP = 200, 1e-3, 20
_ROWS, _ROW_TOKENS = 4, 48
_MODEL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}

Versions = npt.NDArray[np.uint16]
"""[STEPS + 1, elements]: the bits of all parameters in bfloat16, one row per version."""


def bfloat16_versions() -> Versions:
    """The version before the first step, and the one after each. Kept in the folder for temporary files."""
    recipe = hashlib.sha256(Path(__file__).read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    kept = Path(tempfile.gettempdir()) / f"headrace-weight-steps-{os.getuid()}-{recipe}.npy"
    if not kept.exists():
        unfinished = kept.with_suffix(f".{os.getpid()}.npy")
        np.save(unfinished, np.stack([_bits(model) for model in training(STEPS)]))
        unfinished.replace(kept)
    versions: Versions = np.load(kept)
    return versions


def training(steps: int) -> Iterator[Any]:
    """The model before the first step, and after each: one and the same, which goes on."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: Any = LlamaForCausalLM(LlamaConfig(**_MODEL))
    batches = _Batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_PRETRAINING_RATE, betas=ADAM_BETAS, fused=True)
    for step in range(_PRETRAINING_STEPS):
        optimizer.param_groups[0]["lr"] = _PRETRAINING_RATE * min(1.0, (step + 1) / _WARM_UP)
        _step(model, optimizer, batches.next())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=ADAM_BETAS, weight_decay=0.0, fused=True)
    yield model
    for _ in range(steps):
        _step(model, optimizer, batches.next())
        yield model


def _step(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _bits(model: Any) -> npt.NDArray[np.uint16]:
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    bits: npt.NDArray[np.uint16] = flat.bfloat16().view(torch.uint16).numpy()
    return bits


class _Batches:
    """Random places of the sources."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self._text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
        self._random = np.random.default_rng(0)

    def next(self) -> torch.Tensor:
        starts = self._random.integers(0, self._text.size - _ROW_TOKENS, _ROWS)
        rows = [self._text[start : start + _ROW_TOKENS] for start in starts]
        return torch.from_numpy(np.stack(rows).astype(np.int64))
