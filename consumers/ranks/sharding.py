"""Sharding: parameters, gradients and the optimizer's state are spread over the ranks by FSDP2 (`fully_shard`).

Of each parameter a rank holds the rows that `torch.chunk` gives it, as a DTensor. A layer is whole while it computes.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer


def shard(model: Any, ranks: int, device: str) -> None:
    """In place, and layer by layer onto a device of this type, which need not have room for the whole.

    Gradients are summed over all ranks, not averaged: a loss has the denominators of all.
    """
    # Log-probs are a view of what the head's pieces gave; nothing is written into them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    mesh = init_device_mesh(device, (ranks,))
    # What transformers marks as layers; everything else is gathered with the whole model.
    for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Else the factor goes into a reduction that gloo does not have.
            module.set_force_sum_reduction_for_comms(True)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All rows of it, on every rank; all ranks ask at once where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def rows_of(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Those that `torch.chunk` gives this rank, sharded or not; a scalar is everybody's."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    if ranks == 1 or not tensor.dim():
        return tensor
    chunks = tensor.chunk(ranks)
    return chunks[rank] if rank < len(chunks) else tensor[:0]


def placed(full: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """What every rank has whole, on the device and in the shards of a parameter of its shape; shards as they are."""
    full = full.to(parameter.device)
    if isinstance(full, DTensor) or not isinstance(parameter, DTensor):
        return full
    return distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
