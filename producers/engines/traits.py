"""What an engine says of how it runs on its target: what a port to another device has, or lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec


class Trait(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer."""

    has: bool | None
    """None: the engine does not tell."""
    what: str
    """What it has, or has instead."""


UNTOLD = Trait(None, "the engine does not tell")


class Traits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All answers of an engine on its device."""

    device: str
    """What it computes on; "" where it does not tell."""
    software: str
    """What it computes with, and its version; "" where it does not tell."""
    native_backend: Trait = UNTOLD
    """Operations that were made for this device, rather than a fallback."""
    attention_kernel: Trait = UNTOLD
    """A fused or paged attention kernel, rather than attention composed of other operations."""
    paged_cache: Trait = UNTOLD
    """Keys and values in pages, or single tokens, that sequences of any length share."""


@runtime_checkable
class TellsTraits(Protocol):
    """What an engine may offer besides."""

    async def traits(self) -> Traits:
        """Of the engine that was started. Raises EngineError where it has to ask, and is not answered."""
        ...


async def traits_of(engine: object) -> Traits:
    """What is not told is unknown. Raises EngineError as above."""
    return await engine.traits() if isinstance(engine, TellsTraits) else Traits("", "")


def agreed(told: Sequence[Traits]) -> Traits:
    """Of several servers as one engine: where they differ, nothing is known of the whole."""

    def text(values: Sequence[str]) -> str:
        return ", ".join(dict.fromkeys(value for value in values if value))

    def trait(values: Sequence[Trait]) -> Trait:
        same = len({one.has for one in values}) == 1
        what = "; ".join(dict.fromkeys(one.what for one in values))
        return Trait(values[0].has, what) if same else Trait(None, f"the servers differ: {what}")

    return Traits(
        text([one.device for one in told]),
        text([one.software for one in told]),
        trait([one.native_backend for one in told]),
        trait([one.attention_kernel for one in told]),
        trait([one.paged_cache for one in told]),
    )
