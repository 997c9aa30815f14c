"""Activation checkpointing: a layer keeps its input only, and is computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from headrace.errors import ModelError


def recompute_activations(model: Any) -> None:
    """Let the decoder layers of `model` (a transformers causal LM) keep no activations but their inputs.

    Their modules and names stay. Raises ModelError where transformers marks no layers that may be computed again.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} marks no layers that may be computed again; "
            "set trainer.activation_checkpointing = false"
        )
    for layer in layers:
        layer.forward = partial(_again, layer.forward)


def _again(forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*given, **named)
    # Nothing random is in a layer: the trainer's model is in evaluation mode.
    return checkpoint(partial(forward, **named), *given, use_reentrant=False, preserve_rng_state=False)
