"""What the sections of the configuration tree are made of: bounds, checked types, and their common rules."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Port = Annotated[int, Field(ge=0, le=65535)]
Beta = Annotated[float, Field(ge=0, lt=1)]

# Every number has an upper bound: what is larger overflows a clock, a wire integer or the memory long after the start.
WEEK_S = 7 * 86_400.0
LARGEST_COUNT = 1_000_000_000
LARGEST_SIZE = 1 << 24
"""Of a context or a vocabulary, in tokens."""
LARGEST_FACTOR = 1e12
Threads = Annotated[int, Field(ge=1, le=1024)]

LONGEST_NAME, LONGEST_PATH = 255, 3072
"""Bytes of one part of a path and of a whole one on Linux, with room for what is put below it."""


def _possible_path(text: str) -> str:
    """Refuse what no file system takes, or what cannot be told from "not there"."""
    if "\0" in text:
        raise ValueError("must not contain a null character")
    size = len(text.encode())
    longest = max(len(part.encode()) for part in text.split("/"))
    if size > LONGEST_PATH or longest > LONGEST_NAME:
        raise ValueError(f"is too long for a path: {size} bytes, the longest part {longest}")
    return text


PathText = Annotated[str, AfterValidator(_possible_path)]
"""A path, a hub id, or a `path:object` reference."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
