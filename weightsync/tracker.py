"""Who pulls a version from whom, so that its origin sends it about once however many hosts pull it. Pure.

The origin (the weight service of the host where a part was published) is asked by everyone who pulls the part, and
answers with parents. The first one gets the origin, the next ones those who pull or hold it already: a tree in which
each relay has few children and passes chunks on as they come. Parents are always older in the order of arrival, so
that nobody waits for itself. Who reports a failed parent, and has no other, gets the origin's spare slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.version import PolicyVersion
from weightsync.bulk.frames import MAX_PARENTS

CHILDREN = 2
"""Of one relay at the same time."""
PULLING_S = 30.0
"""Who pulls and is not heard of for this long is forgotten."""
HOLDING_S = 600.0
"""So long others are sent to somebody who has it all."""
SUSPECT_S = 10.0
"""So long nobody else is sent to somebody who failed one."""
MAX_PULLS = 64
"""Parts of versions that are tracked at the same time."""
MAX_PULLERS = 1024

Key = tuple[PolicyVersion, int]
"""A version and the number of a part."""


@dataclass(slots=True)
class _Puller:
    address: str
    seen: float
    parent: str = ""
    holds: bool = False
    suspect_until: float = 0.0


class Tracker:
    """The books of one origin. Times are any clock's, in seconds."""

    def __init__(self, upload_slots: int = 1) -> None:
        self._slots = upload_slots
        self._pulls: dict[Key, dict[str, _Puller]] = {}

    def ask(
        self,
        key: Key,
        name: str,
        address: str,
        now: float,
        *,
        origin: str,
        parent: str = "",
        failed: Sequence[str] = (),
    ) -> list[str]:
        """Whom this puller should try, in order; nobody when it has to wait for a place.

        `parent` is who serves it now, and stays the first choice unless it `failed`.
        """
        pullers = self._pull(key, now)
        for other in pullers.values():
            if other.address in failed:
                other.suspect_until, other.parent, other.holds = now + SUSPECT_S, "", False
        if name not in pullers and len(pullers) >= MAX_PULLERS:
            return [origin]
        me = pullers.setdefault(name, _Puller(address, now))
        me.address, me.seen, me.suspect_until, me.holds = address, now, 0.0, False
        known = {origin, *(other.address for other in pullers.values() if other is not me)}
        me.parent = parent or (me.parent if me.parent in known else "")
        # One that left and came again is younger now than those whom it had served.
        if me.parent in failed or me.parent in _younger(pullers, name):
            me.parent = ""
        candidates = [*self._candidates(pullers, me, origin, failed)]
        if me.parent:
            candidates = [me.parent, *(other for other in candidates if other != me.parent)]
        me.parent = candidates[0] if candidates else ""
        return candidates[:MAX_PARENTS]

    def done(self, key: Key, name: str, now: float, *, holds: bool) -> None:
        """This puller asks no one any more; with `holds`, others may ask it."""
        pullers = self._pull(key, now)
        if name in pullers:
            me = pullers[name]
            me.seen, me.parent, me.holds = now, "", True
            if not holds or not me.address:
                del pullers[name]

    def _candidates(
        self, pullers: dict[str, _Puller], me: _Puller, origin: str, failed: Sequence[str]
    ) -> Iterator[str]:
        children = Counter(other.parent for other in pullers.values() if other is not me)
        relays = []
        for other in pullers.values():
            if other is me:
                break
            if other.address and other.address not in failed and not other.suspect_until > me.seen:
                relays.append(other.address)
        yield from (relay for relay in relays if children[relay] < CHILDREN)
        if children[origin] < self._slots + bool(failed):
            yield origin

    def _pull(self, key: Key, now: float) -> dict[str, _Puller]:
        """The living pullers of a part, in order of arrival."""
        pullers = self._pulls.setdefault(key, {})
        for name, puller in [*pullers.items()]:
            if now - puller.seen > (HOLDING_S if puller.holds else PULLING_S):
                del pullers[name]
        while len(self._pulls) > MAX_PULLS:
            del self._pulls[min(other for other in self._pulls if other != key)]
        return pullers


def _younger(pullers: dict[str, _Puller], name: str) -> set[str]:
    """Addresses of those that came after this one."""
    names = [*pullers]
    return {pullers[other].address for other in names[names.index(name) + 1 :]}
