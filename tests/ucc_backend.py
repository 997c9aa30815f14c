"""An out-of-tree backend under the name "ucc", for `HEADRACE_TORCH_BACKENDS`: gloo moves its bytes."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


def _group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


dist.Backend.register_backend("ucc", _group, devices=["cpu"])
