"""Log-probs with entropies: values and gradients of the plain formula, without a second copy of all logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.policy.entropy import chosen_logprobs_and_entropy
from headrace.policy.logprobs import chosen_logprobs


def plain(logits_NV: torch.Tensor, targets_N: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logs_NV = torch.log_softmax(logits_NV.double() / temperature, -1)
    return logs_NV.gather(1, targets_N[:, None])[:, 0], -(logs_NV.exp() * logs_NV).sum(-1)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 40), temperature=st.sampled_from([1.0, 0.6, 2.0]))
def test_values_and_gradients_are_those_of_the_formula(seed: int, count: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, 23, generator=generator) * 3
    targets = torch.randint(0, 23, (count,), generator=generator)
    by_logprob, by_entropy = torch.randn(2, count, generator=generator)
    results = []
    for function in (chosen_logprobs_and_entropy, plain):
        leaf = logits.clone().requires_grad_()
        logprobs, entropy = function(leaf, targets, temperature)
        (logprobs * by_logprob + entropy * by_entropy).sum().backward()
        assert leaf.grad is not None
        results.append((logprobs.detach().float(), entropy.detach().float(), leaf.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results[0][0], chosen_logprobs(logits, targets, temperature), atol=0, rtol=0)


def test_an_entry_that_cannot_be_drawn_has_no_part() -> None:
    logits = torch.tensor([[0.0, 0.0, float("-inf")]], requires_grad=True)
    logprobs, entropy = chosen_logprobs_and_entropy(logits, torch.tensor([0]))
    (logprobs + entropy).sum().backward()
    assert float(entropy.detach()) == pytest.approx(0.6931472)
    assert logits.grad is not None
    assert logits.grad.tolist() == [[0.5, -0.5, 0.0]]


class Largest(TorchDispatchMode):
    """Notes how many operations made a tensor of at least so many elements."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.made: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        for one in result if isinstance(result, tuple | list) else (result,):
            new = isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in given
            if new and one.untyped_storage().nbytes() // one.element_size() >= self.elements:
                self.made.append((str(func), one.dtype))
        return result


def test_nothing_is_as_large_as_the_logits_but_their_gradient() -> None:
    logits = torch.randn(64, 500).to(torch.bfloat16).requires_grad_()
    targets = torch.arange(64)
    with Largest(64 * 500) as forward:
        logprobs, entropy = chosen_logprobs_and_entropy(logits, targets)
        total = (logprobs + entropy).sum()
    assert forward.made == []
    with Largest(64 * 500) as backward:
        total.backward()
    assert {dtype for _, dtype in backward.made} == {torch.bfloat16}
    assert len(backward.made) == 1, backward.made
