"""Whether a version comes as full tensors or as a delta."""

from __future__ import annotations

from typing import Literal


def choose(
    full_bytes: float,
    delta_bytes: float,
    bytes_per_s: float,
    encode_bytes_per_s: float,
    apply_bytes_per_s: float,
) -> Literal["raw", "sparse-ulp"]:
    """The codec that takes fewer estimated seconds. Between hosts: on one there is no wire to save.

    `bytes_per_s` is the link; the other two rates are in bytes of the full version (infinite where it costs nothing,
    as encoding does once it is done). All must be positive. The stages are added up as if none overlapped.
    """
    full_s = full_bytes / bytes_per_s
    delta_s = delta_bytes / bytes_per_s + full_bytes / encode_bytes_per_s + full_bytes / apply_bytes_per_s
    return "sparse-ulp" if delta_s < full_s else "raw"
