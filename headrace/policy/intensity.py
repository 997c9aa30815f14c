"""How intensely a device is used: what the model's shape asks of it, and what it was measured to reach."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from headrace.hosts import host_name
from headrace.policy.prepare import cache_folder
from headrace.telemetry.arithmetic import Roofline, Shape
from headrace.telemetry.phases import Lane

REPEATS = 5
SIDE, SIDE_GPU = 1024, 8192
"""Of the square matrices whose product is measured."""
COPIED, COPIED_GPU = 1 << 27, 1 << 30
"""Bytes that are copied: more than the caches of a core, or of a GPU, hold."""


def shape_of(model: Any) -> Shape:
    """Of a Hugging Face causal language model."""
    parameters = sum(one.numel() for one in model.parameters())
    return Shape.of(model.config.get_text_config(), parameters, model.get_input_embeddings().weight.numel())


def measured(device: str, dtype: str) -> Roofline:
    """What the device reaches with the threads that torch has here: from the cache folder, or measured now.

    Takes some tenths of a second where it was not measured before.
    """
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"cpu of {host_name()}"
    key = f"{name}, {torch.get_num_threads()} threads, {dtype}"
    file = cache_folder() / "roofline.json"
    known = _cached(file)
    if key not in known:
        known[key] = {"flop_per_s": _flop_per_s(device, dtype), "bytes_per_s": _bytes_per_s(device)}
        # Without a cache it is measured at each start.
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            work = file.with_name(f".{file.name}.{os.getpid()}")
            work.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
            work.replace(file)
    return Roofline(float(known[key]["flop_per_s"]), float(known[key]["bytes_per_s"]), dtype)


def observe(lane: Lane, device: str) -> None:
    """On an NVIDIA GPU: let NVML name the lane's device, and mark its phases as NVTX ranges, for Nsight Systems."""
    if not device.startswith("cuda"):
        return
    lane.place.uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    lane.mark = _Ranges(lane.name)


class _Ranges:
    """One NVTX range at a time, begun and ended by whichever thread enters a phase."""

    def __init__(self, lane: str) -> None:
        self._lane = lane
        self._open: Any = None

    def __call__(self, phase: str) -> None:
        before, self._open = self._open, torch.cuda.nvtx.range_start(f"{self._lane}: {phase}")
        if before is not None:
            torch.cuda.nvtx.range_end(before)


def _cached(file: Path) -> dict[str, dict[str, float]]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    whole = isinstance(found, dict) and all(
        isinstance(one, dict) and {"flop_per_s", "bytes_per_s"} <= one.keys() for one in found.values()
    )
    return found if whole else {}


def _flop_per_s(device: str, dtype: str) -> float:
    side = SIDE_GPU if device.startswith("cuda") else SIDE
    left = torch.randn(side, side, device=device).to(getattr(torch, dtype))
    out = torch.empty_like(left)
    return 2.0 * side**3 / _best_s(lambda: torch.mm(left, left, out=out), device)


def _bytes_per_s(device: str) -> float:
    """Both what is read and what is written."""
    size = COPIED_GPU if device.startswith("cuda") else COPIED
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return 2.0 * size / _best_s(lambda: target.copy_(source), device)


def _best_s(work: Callable[[], object], device: str) -> float:
    """Seconds of one call, the shortest of a few, after one that builds what it needs. Of a single thread its own time
    counts: others may use the core meanwhile.
    """
    alone = device == "cpu" and torch.get_num_threads() == 1
    clock, best = time.thread_time if alone else time.perf_counter, float("inf")
    with torch.inference_mode():
        for _ in range(REPEATS + 1):
            start = clock()
            work()
            if device.startswith("cuda"):
                torch.cuda.synchronize(device)
            best = min(best, clock() - start)
    return best
