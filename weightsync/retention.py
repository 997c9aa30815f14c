"""Which segments may be freed: a pure decision, used by the publisher and by each host's weight service."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from headrace.version import PolicyVersion


@dataclass(frozen=True, slots=True)
class Held:
    """A segment that lies on this host."""

    name: str
    version: PolicyVersion
    owner_alive: bool


def freeable(held: Iterable[Held], head: PolicyVersion | None, leased: Collection[PolicyVersion]) -> list[Held]:
    """The segments that nobody needs.

    Kept are: what a live lease reads; the head, also when its trainer is dead, since producers that join while
    another trainer starts have nothing else; and what is newer than the head while its owner lives, for it is
    still being filled. Once its owner is dead, it will never be sealed: who reads it waits in vain.
    """
    return [item for item in held if not _needed(item, head, leased)]


def _needed(item: Held, head: PolicyVersion | None, leased: Collection[PolicyVersion]) -> bool:
    if head is None or item.version > head:
        return item.owner_alive
    return item.version == head or item.version in leased
