"""Full or delta: the fewer estimated seconds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.codecs.choice import choose

GIGABIT = 125e6
positive = st.floats(1.0, 1e13)


@pytest.mark.parametrize(
    ("full", "delta", "link", "encode", "apply", "expected"),
    [
        (270e6, 3e6, GIGABIT, 1e9, 2e9, "sparse-ulp"),
        (270e6, 3e6, 100 * GIGABIT, 1e9, 2e9, "raw"),  # the link is faster than the codec
        (270e6, 3e6, 100 * GIGABIT, math.inf, math.inf, "sparse-ulp"),
        (270e6, 270e6, GIGABIT, math.inf, math.inf, "raw"),  # as fast: the simpler one
        (100.0, 50.0, 1.0, 4.0, math.inf, "sparse-ulp"),  # 100 s against 50 + 25
        (100.0, 50.0, 1.0, 2.0, math.inf, "raw"),  # 100 s against 50 + 50
        (100.0, 50.0, 1.0, math.inf, 4.0, "sparse-ulp"),
        (100.0, 50.0, 1.0, math.inf, 2.0, "raw"),
        (0.0, 0.0, GIGABIT, 1e9, 2e9, "raw"),
    ],
)
def test_the_fewer_seconds(full: float, delta: float, link: float, encode: float, apply: float, expected: str) -> None:
    assert choose(full, delta, link, encode, apply) == expected


@given(full=positive, delta=positive, link=positive, encode=positive, apply=positive)
def test_a_delta_is_chosen_only_when_it_is_smaller_and_stays_chosen_on_a_slower_link(
    full: float, delta: float, link: float, encode: float, apply: float
) -> None:
    if choose(full, delta, link, encode, apply) == "sparse-ulp":
        assert delta < full
        assert choose(full, delta, link / 2, encode, apply) == "sparse-ulp"
