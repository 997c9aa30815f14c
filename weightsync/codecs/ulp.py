"""Steps along a dtype's numbers in order, for bits that are IEEE 754 or bfloat16: sign, then magnitude.

The key of a number is `magnitude`, or `-magnitude - 1` when the sign is set: one to one for all bit patterns (-0 and 0,
infinities, NaN payloads), in the order of the numbers, and one apart for neighbours. Differences of keys wrap around at
the width of the dtype, and are written zigzag (0, -1, 1, -2, ... as 0, 1, 2, 3, ...), so that short steps are small.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

Bits = npt.NDArray[Any]
"""Unsigned integers, as wide as the dtype."""
Keys = npt.NDArray[Any]
"""Signed integers, as wide as the dtype."""


def steps_between(old: Bits, new: Bits) -> Bits:
    """Zigzag steps from each element of `old` to that of `new`; as wide as they are."""
    steps = _keys(_signed(new)) - _keys(_signed(old))
    return _unsigned((steps << 1) ^ (steps >> _top(steps)))


def moved(old: Bits, steps: Bits) -> Bits:
    """The inverse: `new` from `old` and the steps between them."""
    back = _signed(steps >> 1) ^ -_signed(steps & 1)
    return _unsigned(_keys(_keys(_signed(old)) + back))


def _keys(bits: Keys) -> Keys:
    """Keys from bits, and bits from keys: where the sign is set, all other bits flip."""
    top = _top(bits)
    keys: Keys = bits ^ ((bits >> top) & ((1 << top) - 1))
    return keys


def _top(values: Keys) -> int:
    return 8 * values.itemsize - 1


def _signed(bits: Bits) -> Keys:
    return bits.view(f"<i{bits.itemsize}")


def _unsigned(bits: Keys) -> Bits:
    return bits.view(f"<u{bits.itemsize}")
