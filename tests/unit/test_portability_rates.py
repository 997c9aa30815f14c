"""Completions to tokens per second, by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit.portability_rates import Piece, ended, in_flight, part_rates

TWO = [Piece(0.0, 4.0, 8), Piece(2.0, 10.0, 16)]
"""Both of two tokens per second."""


def test_a_part_counts_what_was_decoded_in_it() -> None:
    # 1 to 3: two seconds of the first and one of the second; 3 to 5: one and two; 5 to 7: none and two.
    assert part_rates(TWO, 1.0, 7.0, parts=3) == pytest.approx([3.0, 3.0, 2.0])
    assert in_flight(TWO, 1.0, 7.0) == pytest.approx((3 + 5) / 6)
    assert ended(TWO, 1.0, 7.0) == TWO[:1]


def test_what_lies_outside_counts_nothing() -> None:
    assert part_rates(TWO, 11.0, 13.0, parts=2) == [0.0, 0.0]
    assert in_flight(TWO, 11.0, 13.0) == 0.0


def test_a_completion_that_took_no_time_is_in_one_part() -> None:
    assert part_rates([Piece(3.0, 3.0, 4)], 1.0, 5.0, parts=2) == [0.0, 2.0]


Pieces = st.lists(
    st.builds(
        lambda begin, seconds, tokens: Piece(begin, begin + seconds, tokens),
        st.floats(0, 50),
        st.floats(0, 20),
        st.integers(1, 1000),
    ),
    max_size=20,
)


@given(Pieces, st.integers(1, 9))
def test_no_token_is_lost_or_counted_twice(pieces: list[Piece], parts: int) -> None:
    rates = part_rates(pieces, -1.0, 80.0, parts)
    counted = math.fsum(rates) * 81.0 / parts
    assert counted == pytest.approx(sum(piece.tokens for piece in pieces))
