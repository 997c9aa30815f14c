"""Memory of Redis, of a consumer and of producers over 200,000 groups, all of them through the ports of a run.

    figure             bar      what is divided by what
    redis_growth       ≤ 1.02   used_memory of Redis in the last quarter of the run, over that in the second quarter
    entries_growth     ≤ 1.02   the same of all that its keys hold: entries, fields and members
    consumer_growth    ≤ 1.05   the same of the consumer's resident memory
    producer_growth    ≤ 1.05   the same of the process that all producers share
    redis_rss_growth   -        the same of Redis's resident memory, which is also its allocator's and its file's

Groups of 8 trajectories of 64 tokens by light producers and a light consumer (`benchmarks/fleet.py`): tasks admitted,
taken under leases, renewed, published, validated, judged, noted in the step log, settled at checkpoints; heartbeats,
orders, weight heads and manifests beside it; one group in a hundred fails with a reason of its own. The run goes in 40
parts, between which nothing is under way and everything is measured; each has new producers, which join and leave.
Whatever is kept up to a bound has reached it by the second quarter: the step log, which has the largest one, after
65,536 groups, so that the median of that quarter is of a full one.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil
import redis
from rich.console import Console
from rich.progress import track

from benchmarks.broker import Peer, create
from benchmarks.fleet import consumer_process, fleet_process
from benchmarks.report import Figure, arguments, report
from deploy.redis_server import RedisServer

BARS: dict[str, float | None] = {
    "redis_growth": 1.02,
    "entries_growth": 1.02,
    "consumer_growth": 1.05,
    "producer_growth": 1.05,
    "redis_rss_growth": None,
}
GROUPS, PARTS = 200_000, 40
PRODUCERS, TOKENS, WINDOW, GROUPS_PER_STEP = 8, 64, 256, 8
RUN_ID = "memory"
UNITS = {"entries": ""}
LENGTHS = {b"stream": "XLEN", b"hash": "HLEN", b"zset": "ZCARD", b"list": "LLEN", b"set": "SCARD", b"string": "STRLEN"}


@dataclass(frozen=True, slots=True)
class Sample:
    """What there is between two parts; memory in bytes."""

    redis: float
    entries: float
    consumer: float
    producer: float
    redis_rss: float


class Watch:
    """One Redis, one consumer, one process of producers."""

    def __init__(self, server: RedisServer) -> None:
        assert server.child is not None
        self._server = psutil.Process(server.child.pid)
        # Any: the client's own annotations leave its generic command out.
        self._client: Any = redis.Redis.from_url(server.url)
        self._fleet = Peer(fleet_process, server.url, RUN_ID, TOKENS)
        self._consumer = Peer(consumer_process, server.url, RUN_ID, WINDOW, GROUPS_PER_STEP)

    def part(self, groups: int) -> Sample:
        self._fleet.tell((PRODUCERS, 0.0))
        self._consumer.tell((groups, False))
        published = self._fleet.tell(None)
        assert published == groups, f"{published} groups were published, {groups} asked for"
        return Sample(
            redis=self._used_memory(),
            entries=float(sum(self.lengths().values())),
            consumer=self._consumer.rss(),
            producer=self._fleet.rss(),
            redis_rss=self._server.memory_info().rss,
        )

    def lengths(self) -> dict[str, int]:
        """What each key holds."""
        found = {}
        for key in self._client.scan_iter(count=1000):
            command = LENGTHS[self._client.type(key)]
            if command != "STRLEN":
                found[key.decode()] = int(self._client.execute_command(command, key))
        return found

    def close(self) -> None:
        self._client.close()
        for peer in (self._fleet, self._consumer):
            peer.close()

    def _used_memory(self) -> float:
        """When it rewrites no file, for which it has buffers."""
        info: Any = self._client.info()
        while info["aof_rewrite_in_progress"]:
            # It tells nobody when it is done.
            time.sleep(0.1)
            info = self._client.info()
        return float(info["used_memory"])


def measure(groups: int) -> tuple[list[Sample], dict[str, int]]:
    """A sample after each part, and what the keys hold at the end."""
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder), Path(folder) / "log")
        server.start()
        try:
            asyncio.run(create(server.url, RUN_ID))
            watch = Watch(server)
            try:
                parts = track(range(PARTS), "groups", console=Console(stderr=True))
                return [watch.part(groups // PARTS) for _ in parts], watch.lengths()
            finally:
                watch.close()
        finally:
            server.stop()


def figures(samples: list[Sample]) -> dict[str, Figure]:
    quarter = len(samples) // 4
    found = {}
    for one in fields(Sample):
        values = [getattr(sample, one.name) for sample in samples]
        early, late = (statistics.median(part) for part in (values[quarter : 2 * quarter], values[-quarter:]))
        name = f"{one.name}_growth"
        found[name] = Figure(late, UNITS.get(one.name, "bytes"), early, late / early, BARS[name], at_most=True)
    return found


def main() -> int:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--groups", type=int, default=GROUPS, help=f"groups of the whole run (default {GROUPS})")
    given = parser.parse_args()
    samples, lengths = measure(given.groups)
    console = Console()
    console.print("at the end: " + ", ".join(f"{key.partition(':')[2]} {n}" for key, n in sorted(lengths.items())))
    return report(f"memory over {given.groups} groups", figures(samples), json_file=given.json, check=given.check)


if __name__ == "__main__":
    sys.exit(main())
