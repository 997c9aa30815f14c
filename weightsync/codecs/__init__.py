"""How the bytes of a chunk are written for the wire; `CODECS` names the ways, `get` makes one."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from headrace.errors import WeightError
from headrace.objects import load_object

if TYPE_CHECKING:
    from weightsync.codecs.api import Codec

CODECS = {
    "raw": "weightsync.codecs.raw:RAW",
    "sparse-abs": "weightsync.codecs.sparse:SPARSE_ABS",
    "sparse-ulp": "weightsync.codecs.sparse:SPARSE_ULP",
}
"""Name to `module:object`, imported when chosen."""


@cache
def get(name: str) -> Codec:
    """The codec of this name. Raises WeightError for one that is not known."""
    if name not in CODECS:
        raise WeightError(f"codec {name[:64]!r} is not known; use {', '.join(CODECS)}")
    codec: Codec = load_object(CODECS[name], f"codec {name!r}", WeightError)
    return codec
