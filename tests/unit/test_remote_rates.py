"""The split of servers' time between prompts and decoding, from requests whose cost is known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.engines.remote.rates import Rates


def fitted(prompt_s: float, sampled_s: float, requests: list[tuple[int, int]], noise: float = 0.0) -> Rates:
    rates, chance = Rates(), random.Random(1)
    for prompt, sampled in requests:
        seconds = prompt_s * prompt + sampled_s * sampled
        rates.note(prompt, sampled, seconds * chance.uniform(1 - noise, 1 + noise))
    return rates


REQUESTS = [(40 + n % 5, 10 + 7 * n % 90) for n in range(200)]


def test_rates_are_found_again() -> None:
    assert fitted(1e-4, 2e-2, REQUESTS).seconds == pytest.approx((1e-4, 2e-2))
    prompt_s, sampled_s = fitted(5e-3, 2e-2, REQUESTS, noise=0.1).seconds
    assert prompt_s == pytest.approx(5e-3, rel=0.2)
    assert sampled_s == pytest.approx(2e-2, rel=0.1)


def test_newer_requests_count_more() -> None:
    rates = fitted(1e-3, 1e-2, REQUESTS)
    for prompt, sampled in REQUESTS * 5:
        rates.note(prompt, sampled, 2e-3 * prompt + 3e-2 * sampled)
    assert rates.seconds == pytest.approx((2e-3, 3e-2), rel=0.01)


def test_what_cannot_be_told_apart_counts_as_decoding() -> None:
    assert Rates().seconds == (0.0, 0.0)
    assert Rates().shares(10, 0, 10, 4.0) == [("decode", 1.0)]
    alike = fitted(1e-3, 1e-2, [(40, 20)] * 50)
    assert alike.seconds == (0.0, pytest.approx(0.012))
    assert alike.shares(400, 0, 200, 4.0) == [("decode", 1.0)]


def test_sequences_that_decode_together_share_a_step() -> None:
    rates = fitted(1e-3, 1e-2, REQUESTS)
    shares = dict(rates.shares(1000, 500, 800, 8.0))
    # 1 s of prompts, half a second of recomputation, and 8 s of tokens eight at a time.
    assert shares == pytest.approx({"prefill": 0.4, "recompute": 0.2, "decode": 0.4})


counts = st.integers(0, 10_000)


@given(st.lists(st.tuples(counts, counts, st.floats(0, 1e4)), max_size=20), counts, counts, counts, st.floats(0, 512))
def test_shares_are_shares_whatever_servers_say(
    requests: list[tuple[int, int, float]], prefilled: int, recomputed: int, decoded: int, together: float
) -> None:
    rates = Rates()
    for request in requests:
        rates.note(*request)
    shares = rates.shares(prefilled, recomputed, decoded, together)
    assert all(0 <= share <= 1 + 1e-9 for _, share in shares)
    assert sum(share for _, share in shares) == pytest.approx(1.0)
