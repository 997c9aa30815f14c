"""Which backends of torch.distributed there are here."""

from __future__ import annotations

import importlib
import os

PLUGINS_VARIABLE = "HEADRACE_TORCH_BACKENDS"
"""Modules, separated by commas, that register backends with torch when they are imported."""


def usable_backends() -> list[str]:
    """What this torch can use here, the best first. Raises ImportError without torch, or a plugin's own error."""
    import torch
    import torch.distributed as dist

    for name in filter(None, os.environ.get(PLUGINS_VARIABLE, "").split(",")):
        importlib.import_module(name.strip())
    has = {
        "nccl": dist.is_nccl_available() and torch.cuda.is_available(),
        "ucc": dist.is_ucc_available() or "UCC" in dist.Backend._plugins,
        "gloo": dist.is_gloo_available(),
    }
    return [name for name, there in has.items() if there]
