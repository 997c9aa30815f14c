"""The bytes themselves."""

from __future__ import annotations

import numpy as np

from headrace.errors import WireError
from weightsync.placement import Bytes


class Raw:
    name = "raw"

    def encode(self, base: Bytes | None, new: Bytes, dtype: str) -> memoryview:
        return new.data

    def decode(self, payload: bytes | memoryview, out: Bytes, dtype: str) -> None:
        fill(out, payload)


def fill(out: Bytes, data: bytes | memoryview) -> None:
    """Copy `data` into `out`. Raises WireError when it is not exactly as long."""
    if len(data) != out.nbytes:
        raise WireError(f"a chunk of {out.nbytes} bytes came as {len(data)} bytes")
    out[:] = np.frombuffer(data, np.uint8)


RAW = Raw()
