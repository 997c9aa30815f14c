"""Device-seconds of lanes, also of those that share a device. Pure.

A device that several lanes share is one device: at each moment it is of those lanes that work, in equal parts, and
while none works, of all. So its seconds sum to its wall time, whoever had it, and its idle time is what nobody used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from audit.records import EXIT, LOST, Lane, Piece

IDLE = frozenset({"start", EXIT, LOST})
"""Phases without the prefix of waits in which a device does nothing either."""


def device_seconds(
    lanes: Sequence[Lane], begin: float = float("-inf"), end: float = float("inf")
) -> Iterator[tuple[Lane, dict[str, float]]]:
    """Of each device lane, phase to device-seconds between two moments."""
    together: dict[str, list[Lane]] = defaultdict(list)
    for lane in lanes:
        if lane.is_device and lane.shared:
            together[lane.host].append(lane)
        elif lane.is_device:
            yield lane, {phase: spent * lane.devices for phase, spent in lane.seconds(begin, end).items()}
    for sharing in together.values():
        yield from zip(sharing, _parts(sharing, begin, end), strict=True)


def _parts(lanes: Sequence[Lane], begin: float, end: float) -> list[dict[str, float]]:
    """Of one device: what each of its lanes had of it."""
    edges: list[tuple[float, int, Piece]] = []
    for number, lane in enumerate(lanes):
        for piece in lane.between(begin, end):
            edges += [(piece.begin, number, piece), (piece.end, number, piece)]
    edges.sort(key=lambda edge: edge[:2])
    found: list[dict[str, float]] = [{} for _ in lanes]
    now: dict[int, Piece] = {}
    for (at, number, piece), following in zip(edges, [*edges[1:], None], strict=True):
        if at == piece.begin:
            now[number] = piece
        elif now.get(number) == piece:
            del now[number]
        spent = following[0] - at if following else 0.0
        if spent <= 0 or not now:
            continue
        working = {one: open_ for one, open_ in now.items() if not (open_.idle or open_.phase in IDLE)} or now
        for one, open_ in working.items():
            found[one][open_.phase] = found[one].get(open_.phase, 0.0) + spent / len(working)
    return found
