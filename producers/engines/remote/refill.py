"""How many requests a server is given at once, and which server a request goes to: plain decisions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

FULL = 0.85
"""Share of the cache beyond which no further request is given: those that run still grow."""
ROOMY = 0.5
"""Share up to which the limit grows by a part of itself a reading."""
GROWTH = 8
"""Which part."""
SHRINK = 0.75


@dataclass(frozen=True, slots=True)
class Load:
    """A server's own figures at one moment."""

    running: int
    queued: int
    """Requests that it has and does not compute yet."""
    used_tokens: int
    """Of its cache, by requests that run; what is only kept for others to share does not count."""
    capacity_tokens: int
    max_running: int
    retractions: int = 0
    """Requests that it had to take out again for want of cache, since its start."""

    @property
    def usage(self) -> float:
        return self.used_tokens / self.capacity_tokens if self.capacity_tokens > 0 else 0.0


def ceiling(slots: int, max_running: int) -> int:
    """The most requests that may be open at a server, whatever its figures: one in 17 waits there for a slot."""
    return max(1, min(slots, max_running + max(1, max_running // 16)) if max_running > 0 else slots)


def next_limit(limit: int, most: int, before: Load | None, now: Load) -> int:
    """How many requests may be open at a server from now on, 1 to `most`, by its last two readings.

    Fewer when it had to take requests out again; no more than it computes when it queues some; no more than fit into
    its cache as long as those that run are, else more: fast as long as the cache has room, then one by one.
    """
    if before is not None and now.retractions > before.retractions:
        return _within(min(limit - 1, math.floor(SHRINK * max(now.running, 1))), most)
    if now.usage > FULL:
        return _within(min(limit, max(now.running, 1)), most)
    if before is not None and min(now.queued, before.queued) > 0 and 0 < now.running <= before.running:
        # It does not take what has just come, it takes no more. One in its queue refills a slot at the same step.
        return _within(min(limit, now.running + 1), most)
    step = max(1, limit // GROWTH) if now.usage < ROOMY else 1
    return _within(min(limit + step, max(limit, _fitting(now))), most)


def _fitting(now: Load) -> int:
    """Requests as long as those that run that fill the cache to `FULL`; more than there can be where nothing tells."""
    if 0 in (now.running, now.used_tokens, now.capacity_tokens):
        return now.running + max(1, now.max_running)
    return math.floor(FULL * now.capacity_tokens * now.running / now.used_tokens)


def choose(key: str, room: Mapping[str, tuple[int, int]]) -> str | None:
    """The server for a request whose prompt is shared by all of `key`; None where no server has room.

    `room`: requests open and their limit, by server. Requests of one key meet at one server, whose cache then has their
    prompt, as long as there is room; else the one with most room takes it. Servers that come and go move few keys.
    """
    free = {name: limit - held for name, (held, limit) in room.items() if held < limit}
    if not free:
        return None
    favourite = max(room, key=lambda name: xxhash.xxh3_64_intdigest(f"{key} {name}".encode()))
    return favourite if favourite in free else max(free, key=lambda name: (free[name], name))


def group_key(request_id: str, prompt: bytes) -> str:
    """What requests with a common beginning have in common: of "task/member/turn" the task, else the prompt."""
    task, _, rest = request_id.rpartition("/")
    group, _, member = task.rpartition("/")
    if group and rest and member:
        return group
    return xxhash.xxh3_64_hexdigest(prompt)


def _within(limit: int, most: int) -> int:
    return max(1, min(limit, most))
