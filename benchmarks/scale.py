"""One Redis and one consumer under 1, 4, 16 and 64 producers, and how soon a group is received.

    figure                        bar      what is divided by what
    cpu_per_trajectory_64_vs_4    ≤ 1.25   CPU time of Redis and the consumer per trajectory, 64 producers over 4
    wakeup_vs_block               ≤ 2      publish to receipt at low load, over the same bytes by XADD to XREAD BLOCK
    wakeup_vs_groups              -        the same, with the groups encoded and decoded there, too
    cpu_per_trajectory_N          -        the same with N producers
    rate_N                        -        trajectories/s that came through

Groups of 8 trajectories of 64 tokens, so that what counts is the cost of a message and not of its bytes. Producers are
light ones (`benchmarks/fleet.py`): all of them in one process, each with its own name, lease, connections and loops.
At most 512 groups are under way, whatever the number of producers; the consumer makes a step of every 64 of them, with
everything that a trainer asks of the broker for it. CPU time is that of the operating system's accounts; rounds with
different numbers of producers take turns, in an order that turns too; a ratio is the median of those of each turn.

At low load one group is under way at a time, from one of 4 producers, and everybody else sleeps. In turn with it the
same bytes go from one process to another by the same client: bare XADD and bare XREAD BLOCK with nothing around them,
or (wakeup_vs_groups) the codec alone. What lies between is the fence, leases, attempts and acknowledgement;
a wait that polls would show as milliseconds.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import psutil
import redis.asyncio
import uvloop

from benchmarks.broker import Peer, create
from benchmarks.fleet import consumer_process, fleet_process
from benchmarks.message_path import GROUP_SIZE, VOCABULARY, pool
from benchmarks.report import Figure, arguments, report
from broker.codec import decode_group, encode_group
from broker.messages import Group
from broker.validate import Limits
from deploy.redis_server import RedisServer

BARS: dict[str, float | None] = {"cpu_per_trajectory_64_vs_4": 1.25, "wakeup_vs_block": 2.0, "wakeup_vs_groups": None}
PRODUCERS = (1, 4, 16, 64)
TOKENS = 64
WINDOW, GROUPS_PER_STEP = 512, 64
"""As a trainer with `max_lag` 8 has them."""
ROUND, WARM_UP = 5000, 500
"""Groups."""
WAKEUPS = 100
"""Groups of one round at low load."""
DECODE_S = 0.01
"""What a producer takes for a group at low load, so that all others have gone to sleep by then."""
RUN_ID = "scale"
STREAM = "bare"


@dataclass(frozen=True, slots=True)
class Round:
    """What one round with so many producers took."""

    redis_s: float
    consumer_s: float
    """CPU seconds per trajectory."""
    rate: float
    """Trajectories per second."""

    @property
    def cpu_s(self) -> float:
        return self.redis_s + self.consumer_s


class Scale:
    """A Redis, a consumer, a process of producers, and two bare processes."""

    def __init__(self, server: RedisServer) -> None:
        assert server.child is not None
        self._redis = psutil.Process(server.child.pid)
        self.fleet = Peer(fleet_process, server.url, RUN_ID, TOKENS)
        self.consumer = Peer(consumer_process, server.url, RUN_ID, WINDOW, GROUPS_PER_STEP)
        self.reader = Peer(bare_reader, server.url)
        self.writer = Peer(bare_writer, server.url, replace(pool(TOKENS)[0], task_id="t000000000"))

    def round(self, producers: int) -> Round:
        self.fleet.tell((producers, 0.0))
        self.consumer.tell((WARM_UP, False))
        before, start = self._cpu(), time.monotonic()
        self.consumer.tell((ROUND, False))
        wall, after = time.monotonic() - start, self._cpu()
        self.fleet.tell(None)
        redis_s, consumer_s = ((late - early) / ROUND / GROUP_SIZE for early, late in zip(before, after, strict=True))
        return Round(redis_s, consumer_s, ROUND * GROUP_SIZE / wall)

    def wakeup_s(self) -> float:
        """Median seconds from publish to receipt."""
        self.fleet.tell((4, DECODE_S))
        waits: list[float] = self.consumer.tell((WAKEUPS, True))
        self.fleet.tell(None)
        return statistics.median(waits)

    def block_s(self) -> tuple[float, float]:
        """The same between the bare two: of groups, and of their bytes."""
        self.reader.pipe.send(WAKEUPS)
        self.writer.tell(WAKEUPS)
        waits: list[tuple[float, float]] = self.reader.answer()
        groups, bodies = (statistics.median(column) for column in zip(*waits, strict=True))
        return groups, bodies

    def close(self) -> None:
        for peer in (self.fleet, self.consumer, self.reader, self.writer):
            peer.close()

    def _cpu(self) -> tuple[float, float]:
        return sum(self._redis.cpu_times()[:4]), self.consumer.cpu()


def bare_reader(pipe: Pipe, url: str) -> None:
    """For each number so many entries by XREAD BLOCK, answered with the seconds that each group and its bytes took."""

    async def serve() -> None:
        client: Any = redis.asyncio.Redis.from_url(url, protocol=2)
        limits = Limits(VOCABULARY, {"train": GROUP_SIZE})
        after: Any = "0"
        pipe.send(None)
        while (count := await asyncio.to_thread(pipe.recv)) is not None:
            waits: list[tuple[float, float]] = []
            while len(waits) < count:
                reply = await client.execute_command("XREAD", "BLOCK", 1000, "STREAMS", STREAM, after)
                read = time.monotonic()
                for entry_id, fields in reply[0][1] if reply else ():
                    after = entry_id
                    decode_group(fields[b"body"], limits)
                    decoded = time.monotonic()
                    waits.append((decoded - float(fields[b"made"]), read - float(fields[b"sent"])))
            pipe.send(waits)
        await client.aclose()

    uvloop.run(serve())


def bare_writer(pipe: Pipe, url: str, group: Group) -> None:
    """For each number so many entries, with pauses."""

    async def serve() -> None:
        client: Any = redis.asyncio.Redis.from_url(url, protocol=2)
        pipe.send(None)
        while (count := await asyncio.to_thread(pipe.recv)) is not None:
            for _ in range(count):
                await asyncio.sleep(DECODE_S)
                made = time.monotonic()
                body = encode_group(group, VOCABULARY)
                said = ("made", made, "sent", time.monotonic(), "body", body)
                await client.execute_command("XADD", STREAM, "MAXLEN", 64, "*", *said)
            pipe.send(None)
        await client.aclose()

    uvloop.run(serve())


def measure(repeats: int) -> dict[str, Figure]:
    """All figures, on a Redis of its own."""
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder), Path(folder) / "log")
        server.start()
        try:
            asyncio.run(create(server.url, RUN_ID))
            scale = Scale(server)
            try:
                return figures(*_rounds(scale, repeats))
            finally:
                scale.close()
        finally:
            server.stop()


def _rounds(scale: Scale, repeats: int) -> tuple[dict[int, list[Round]], list[tuple[float, ...]]]:
    loads: dict[int, list[Round]] = {producers: [] for producers in PRODUCERS}
    waits: list[tuple[float, ...]] = []
    for repeat in range(repeats):
        turned = [*PRODUCERS[repeat % 4 :], *PRODUCERS[: repeat % 4]]
        for producers in turned:
            loads[producers].append(scale.round(producers))
            waits.append((scale.wakeup_s(), *scale.block_s()))
        print(
            f"repeat {repeat + 1}: microseconds of CPU per trajectory, Redis and consumer: "
            + ", ".join(f"{n}: {1e6 * r[-1].redis_s:.0f} + {1e6 * r[-1].consumer_s:.0f}" for n, r in loads.items()),
            file=sys.stderr,
        )
    return loads, waits


def figures(loads: dict[int, list[Round]], waits: list[tuple[float, ...]]) -> dict[str, Figure]:
    cpu_us = {producers: [1e6 * one.cpu_s for one in rounds] for producers, rounds in loads.items()}
    wakeup_us, groups_us, bytes_us = ([1e6 * one for one in column] for column in zip(*waits, strict=True))
    found = {
        "cpu_per_trajectory_64_vs_4": _compared("cpu_per_trajectory_64_vs_4", cpu_us[64], cpu_us[4]),
        "wakeup_vs_block": _compared("wakeup_vs_block", wakeup_us, bytes_us),
        "wakeup_vs_groups": _compared("wakeup_vs_groups", wakeup_us, groups_us),
    }
    found |= {
        f"cpu_per_trajectory_{producers}": Figure(statistics.median(us), "us") for producers, us in cpu_us.items()
    }
    rates = {producers: statistics.median(one.rate for one in rounds) for producers, rounds in loads.items()}
    return found | {f"rate_{producers}": Figure(rate, "trajectories/s") for producers, rate in rates.items()}


def _compared(name: str, values: list[float], baselines: list[float]) -> Figure:
    """By the median of what was measured one after the other: both met the same machine."""
    ratio = statistics.median(value / baseline for value, baseline in zip(values, baselines, strict=True))
    return Figure(
        statistics.median(values), "us", statistics.median(baselines), ratio, BARS[name], at_most=BARS[name] is not None
    )


def main() -> int:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of each number of producers (default 5)")
    given = parser.parse_args()
    return report(
        "one Redis and one consumer under many producers",
        measure(given.repeats),
        json_file=given.json,
        check=given.check,
    )


if __name__ == "__main__":
    sys.exit(main())
