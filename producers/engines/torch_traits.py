"""What the embedded engine uses on its device."""

from __future__ import annotations

from pathlib import Path

import torch

from producers.engines.kv_pages import PAGE
from producers.engines.packed_linear import can_pack
from producers.engines.traits import Trait, Traits

CPU_INFO = Path("/proc/cpuinfo")
BACKENDS = ("cpu", "cuda", "mps", "xpu")
"""Kinds of devices that torch itself has operations for."""


def traits(device: str, dtype: str) -> Traits:
    """`device` and `dtype` are those that the engine computes on and in, as torch names them."""
    kind = torch.device(device).type
    return Traits(
        device=device_name(device),
        software=f"torch {torch.__version__}, {dtype}",
        native_backend=_backend(kind, dtype),
        attention_kernel=Trait(False, "batched products over pages with torch's own operations, not fused"),
        paged_cache=Trait(True, f"pages of {PAGE} tokens, in one pool for all slots"),
    )


def device_name(device: str, info: Path = CPU_INFO) -> str:
    """That of the hardware, with torch's name for it."""
    kind = torch.device(device).type
    name = torch.cuda.get_device_name(device) if kind == "cuda" else _processor(info) if kind == "cpu" else ""
    return f"{name} ({device})" if name else device


def _backend(kind: str, dtype: str) -> Trait:
    if kind not in BACKENDS:
        return Trait(None, f"a backend for {kind} from outside torch")
    if kind == "cpu":
        packed = can_pack(getattr(torch, dtype), torch.device(kind))
        return Trait(True, "torch's for the CPU, linear layers packed for oneDNN" if packed else "torch's for the CPU")
    return Trait(True, f"torch's for {'ROCm' if kind == 'cuda' and torch.version.hip else kind.upper()}")


def _processor(info: Path) -> str:
    """As the operating system names it; "" where it does not."""
    try:
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
