"""Which floating-point type to compute in. On a CPU nobody can tell from its name: it is measured."""

from __future__ import annotations

import time
from typing import Any

ROWS = 32
BUDGET_S = 0.15
"""Seconds per type; the whole measurement stays below half a second."""


def compute_dtype(requested: str, device: str, hidden: int, intermediate: int, rows: int = ROWS) -> str:
    """ "float32", "bfloat16" or "float16": `requested`, unless that is "auto".

    "auto" is bfloat16 on a GPU. On a CPU it is whichever is faster for a product of `rows` activations with a
    weight of `intermediate` x `hidden`: bfloat16 wins by memory traffic and by matrix units where the CPU has
    them, and loses badly where it must be emulated. `rows` is the batch of a decode step for an engine, the
    tokens of a microbatch for a trainer, whose autocast follows the answer.
    """
    if requested != "auto":
        return requested
    if device.startswith("cuda"):
        return "bfloat16"
    seconds = measure(hidden, intermediate, rows)
    return "bfloat16" if seconds["bfloat16"] < seconds["float32"] else "float32"


def measure(hidden: int, intermediate: int, rows: int = ROWS) -> dict[str, float]:
    """Best observed seconds of one product per type, interleaved so that both meet the same machine."""
    import torch
    from torch.nn.functional import linear

    operands: dict[str, tuple[Any, Any]] = {}
    for name in ("float32", "bfloat16"):
        dtype = getattr(torch, name)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(rows, hidden, generator=generator).to(dtype)
        operands[name] = x, torch.randn(intermediate, hidden, generator=generator).to(dtype)
    best = dict.fromkeys(operands, float("inf"))
    spent = dict.fromkeys(operands, 0.0)
    with torch.inference_mode():
        for x, weight in operands.values():
            linear(x, weight)  # the first call builds the kernel
        while any(seconds < BUDGET_S for seconds in spent.values()):
            for name, (x, weight) in operands.items():
                if spent[name] >= BUDGET_S:
                    continue
                start = time.perf_counter()
                linear(x, weight)
                seconds = time.perf_counter() - start
                best[name] = min(best[name], seconds)
                spent[name] += seconds
    return best
