"""Steps along a dtype's numbers: in their order, one apart for neighbours, there and back for all bit patterns."""

from __future__ import annotations

import numpy as np
import pytest

from weightsync.codecs.ulp import moved, steps_between


def test_all_pairs_of_far_bit_patterns_come_back() -> None:
    every = np.arange(1 << 16, dtype=np.uint32).astype("<u2")
    for shift in (0, 1, 2, 0x7F80, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        other = np.roll(every, shift)
        steps = steps_between(every, other)
        assert np.array_equal(moved(every, steps), other)
        assert (shift == 0) == (not steps.any())


def test_random_pairs_of_32_bits_come_back() -> None:
    old, new = np.random.default_rng(0).integers(0, 1 << 32, (2, 100_000), dtype=np.uint32).astype("<u4")
    assert np.array_equal(moved(old, steps_between(old, new)), new)


def test_a_step_leads_to_the_next_number() -> None:
    """All of float16 from minus infinity to infinity; -0 is the number before 0."""
    negative = np.arange(0xFC00, 0x7FFF, -1, dtype=np.int64)
    in_order = np.concatenate([negative, np.arange(0x7C01)]).astype("<u2")
    values = in_order.view(np.float16).astype(np.float64)
    assert (values[:-1] <= values[1:]).all()
    assert np.array_equal(moved(in_order[:-1], np.full(in_order.size - 1, 2, "<u2")), in_order[1:])


@pytest.mark.parametrize(("step", "zigzag"), [(0, 0), (-1, 1), (1, 2), (-2, 3), (2, 4), (-300, 599), (300, 600)])
def test_steps_are_zigzag(step: int, zigzag: int) -> None:
    one = 0x3F80_0000
    positive, negative = (np.array([one | sign, (one + step) | sign], "<u4") for sign in (0, 0x8000_0000))
    assert steps_between(positive[:1], positive[1:]) == zigzag
    # A larger magnitude is a smaller negative number.
    assert steps_between(negative[1:], negative[:1]) == zigzag
