"""Activation checkpointing: the same numbers, of less that is kept."""

import pytest
import torch

from headrace.errors import ModelError
from headrace.policy.activations import recompute_activations
from headrace.policy.blocks import Block
from headrace.policy.logprobs import packed_logprobs
from headrace.policy.packed_attention import use_packed_attention
from tests.tiny import tiny_llama

LENGTH = 256


def kept_and_gradient(*, recomputed: bool) -> tuple[int, torch.Tensor]:
    """Bytes that the forward pass keeps, inputs and parameters left out, and the gradient."""
    model = tiny_llama(3)
    use_packed_attention(model)
    if recomputed:
        recompute_activations(model)
    ids_T = torch.arange(LENGTH) % 64
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    last = torch.tensor([LENGTH - 1])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        blocks = (Block(0, 0, (LENGTH,)),)
        logprobs = packed_logprobs(model, ids_T, torch.arange(LENGTH), blocks, last, ids_T[last], 1.0)
    used = sum(kept.values())
    logprobs.sum().backward()  # type: ignore[no-untyped-call]
    return used, torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def test_it_keeps_a_fraction_and_changes_nothing() -> None:
    plain, expected = kept_and_gradient(recomputed=False)
    fewer, gradient = kept_and_gradient(recomputed=True)
    torch.testing.assert_close(gradient, expected, atol=0, rtol=0)
    assert fewer < plain / 4


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Linear marks no layers .* trainer.activation_checkpointing = false"):
        recompute_activations(torch.nn.Linear(2, 2))
