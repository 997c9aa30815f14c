"""The behaviour distribution is what the sampler samples from, and random numbers belong to their request alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.policy.sampling import RowSettings, behaviour_logits, behaviour_logprobs, sample, uniforms


def rows(temperature: list[float], top_p: list[float] | None = None, top_k: list[int] | None = None) -> RowSettings:
    count = len(temperature)
    return RowSettings(np.array(temperature), np.array(top_p or [1.0] * count), np.array(top_k or [0] * count))


def logits(count: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def test_uniforms_depend_on_seed_and_position_alone() -> None:
    seeds, positions = np.array([7, 8, 7], np.uint64), np.array([3, 3, 4], np.uint64)
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(3)]
    assert together.tolist() == alone
    assert len(set(alone)) == 3


def test_uniforms_are_uniform() -> None:
    drawn = uniforms(np.full(20_000, 11, np.uint64), np.arange(20_000, dtype=np.uint64))
    counts, _ = np.histogram(drawn, bins=20, range=(0, 1))
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert abs(counts - 1000).max() < 150  # almost five standard deviations
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03


@settings(max_examples=60)
@given(
    vocabulary=st.sampled_from([2, 7, 255, 256, 257, 700]),
    uniform=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2**-53])),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.05, 0.5, 0.95, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 1000]),
    seed=st.integers(0, 50),
)
def test_sample_inverts_the_cumulative_distribution(
    vocabulary: int, uniform: float, temperature: float, top_p: float, top_k: int, seed: int
) -> None:
    given_logits, setting = logits(1, vocabulary, seed), rows([temperature], [top_p], [top_k])
    token, logprob = sample(given_logits, setting, np.array([uniform]))
    expected = behaviour_logprobs(given_logits, setting)[0].double()
    ends = expected.exp().cumsum(0) / expected.exp().sum()
    start = float(ends[token[0] - 1]) if token[0] else 0.0
    assert start - 1e-5 <= uniform <= float(ends[token[0]]) + 1e-5
    assert np.isfinite(logprob[0])
    assert logprob[0] == pytest.approx(float(expected[token[0]]), abs=1e-4)


def test_tokens_without_probability_are_never_sampled() -> None:
    given_logits = torch.full((4, 600), float("-inf"))
    given_logits[:, 300] = 0.0
    tokens, logprobs = sample(given_logits, rows([1.0] * 4), np.array([0.0, 0.25, 0.75, 1 - 2**-53]))
    assert tokens.tolist() == [300] * 4
    assert logprobs.tolist() == [0.0] * 4


def test_greedy_takes_the_best_and_tells_the_logprob_at_temperature_one() -> None:
    given_logits = logits(2, 100)
    tokens, logprobs = sample(given_logits, rows([0.0, 1.0], [0.1, 1.0], [2, 0]), np.array([0.9, 0.5]))
    assert tokens[0] == int(given_logits[0].argmax())
    assert logprobs[0] == pytest.approx(float(torch.log_softmax(given_logits[0], -1).max()), abs=1e-5)


def test_top_k_then_top_p() -> None:
    given_logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    kept = lambda setting: torch.isfinite(behaviour_logits(given_logits, setting))[0].tolist()  # noqa: E731
    assert kept(rows([1.0], top_k=[2])) == [True, True, False, False]
    assert kept(rows([1.0], top_p=[0.65])) == [True, True, False, False]
    assert kept(rows([1.0], top_p=[0.75])) == [True, True, True, False]
    # After top-k the first has 4/7 of the mass, which alone reaches 0.5.
    assert kept(rows([1.0], [0.5], [2])) == [True, False, False, False]


def test_a_flat_distribution_is_cut_beyond_the_first_candidates() -> None:
    given_logits = torch.arange(3000, dtype=torch.float32)[None] * 1e-5
    kept = int(torch.isfinite(behaviour_logits(given_logits, rows([1.0], [0.8])))[0].sum())
    assert kept == pytest.approx(2400, abs=30)


def test_settings_of_one_row_do_not_touch_another_nor_the_callers_logits() -> None:
    given_logits = logits(3, 64)
    before = given_logits.clone()
    together = behaviour_logprobs(given_logits, rows([0.5, 1.0, 1.0], [1.0, 0.3, 1.0], [0, 0, 5]))
    assert torch.equal(given_logits, before)
    assert torch.allclose(together[0], behaviour_logprobs(given_logits[:1], rows([0.5]))[0])
    assert torch.equal(together[1], behaviour_logprobs(given_logits[1:2], rows([1.0], [0.3]))[0])
    assert torch.equal(together[2], behaviour_logprobs(given_logits[2:], rows([1.0], [1.0], [5]))[0])
