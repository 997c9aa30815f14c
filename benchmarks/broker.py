"""The message path, validated, deduplicated, leased and acknowledged, against bare streams of the same bytes.

    figure             bar    what is divided by what
    ratio_1024         0.65   groups/s of the real path, over those of the bare one; trajectories of 1,024 tokens
    ratio_8192         0.65   the same with trajectories of 8,192 tokens
    ratio_N_plain      -      the same over the fastest bare way of redis-py as it is installed alone, without hiredis
    bytes_per_token    ≤ 7    bytes of an encoded group over its tokens, vocabulary of 65,536; the larger of both sizes

A producer and a consumer process, and one Redis on loopback with the settings that `headrace up` gives it. Groups of 8;
one token in sixteen is prompt; two version spans each, as after a swap. The real path is that of a run: tasks are
admitted under the fence up to a window, taken under a lease that is renewed, encoded, published by the script that
acknowledges the task, taken, decoded, checked (lengths, ranges, finite), deduplicated, judged, and settled.

The bare path sends the same bytes, encoded before, through pipelined XADD, XREADGROUP and XACK of redis-py between
two other processes, and nothing else. Every way of using the client that this machine has is tried first, and the
fastest is the baseline; its pipelines hold as many entries as the real path's may. Rounds are interleaved, figures are
medians. Also printed: what one group costs on each process and, from rounds of their own, where the time goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import bare_streams
from benchmarks.bare_streams import Way, ways
from benchmarks.message_path import GROUP_SIZE, VOCABULARY, pool, producer_process, record_of, trainer_process
from benchmarks.report import Figure, arguments, report
from broker.codec import encode_group
from broker.connect import connect_runs
from deploy.redis_server import RedisServer

BARS: dict[str, float] = {"ratio_1024": 0.65, "ratio_8192": 0.65, "bytes_per_token": 7.0}
DEPTH = 32
"""Entries of one pipeline, and of one read."""
SIZES = {1024: 2048, 8192: 384}
"""Tokens of a trajectory to groups of one round."""
TRIES = 3
"""Rounds of each bare way before one is chosen."""
RUN_ID = "benchmark"


@dataclass(frozen=True, slots=True)
class Round:
    """What one group took in one round, microseconds."""

    wall: float
    producer: float
    consumer: float
    redis: float
    """CPU time of the three processes; Redis's with its children, which rewrite its file."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found for one length of trajectories."""

    real: Round
    bare: Round
    way: Way
    """The fastest bare one, which is the baseline."""
    tried: dict[Way, float]
    stages: dict[str, dict[str, float]]
    """CPU microseconds of the real path by process and stage."""
    nbytes: float
    """Of an encoded group."""


class Bench:
    """Both paths between four processes on one Redis, for one length of trajectories."""

    def __init__(self, server: RedisServer, tokens: int) -> None:
        assert server.child is not None
        self.tokens, self.count = tokens, SIZES[tokens]
        self._redis = psutil.Process(server.child.pid)
        groups = pool(tokens)
        self.bodies = [encode_group(replace(one, task_id="task-100000"), VOCABULARY) for one in groups]
        self.real = (
            Peer(producer_process, server.url, RUN_ID, groups),
            Peer(trainer_process, server.url, RUN_ID, DEPTH),
        )
        self.bare = (
            Peer(bare_streams.serve, server.url, self.bodies, DEPTH, True),
            Peer(bare_streams.serve, server.url, self.bodies, DEPTH, False),
        )

    def measure(self, repeats: int) -> Measured:
        tried = {way: median([self.bare_round(way) for _ in range(TRIES)]).wall for way in ways()}
        best = min(tried, key=tried.__getitem__)
        self.real_round()
        rounds = [(self.bare_round(best), self.real_round()) for _ in range(repeats)]
        bare, real = (median(list(each)) for each in zip(*rounds, strict=True))
        metered = [self.stages() for _ in range(TRIES)]
        stages = {
            role: {name: statistics.median(one[role][name] for one in metered) for name in times}
            for role, times in metered[0].items()
        }
        nbytes = statistics.mean(map(len, self.bodies))
        return Measured(real, bare, best, tried, stages, nbytes)

    def bare_round(self, way: Way) -> Round:
        for peer in self.bare:
            peer.tell((way, self.count))

        def play() -> None:
            for peer in self.bare:
                peer.pipe.send(True)
            for peer in self.bare:
                peer.answer()

        return self._measured(play, self.bare)

    def real_round(self) -> Round:
        return self._measured(lambda: self._play(False), self.real)

    def stages(self) -> dict[str, dict[str, float]]:
        """A round of its own: microseconds of CPU per group by stage, of each process."""
        producer, _ = self.real
        producer.tell(True)
        trained = self._play(True)
        found = {"producer": producer.tell(False), "consumer": trained}
        return {role: {name: 1e6 * s / self.count for name, s in times.items()} for role, times in found.items()}

    def close(self) -> None:
        for peer in (*self.real, *self.bare):
            peer.close()

    def _play(self, metered: bool) -> dict[str, float]:
        _, trainer = self.real
        tokens, seconds = trainer.tell((self.count, metered))
        assert tokens == self.count * GROUP_SIZE * self.tokens, f"{tokens} tokens arrived"
        return dict(seconds)

    def _measured(self, play: Callable[[], object], peers: tuple[Peer, Peer]) -> Round:
        before, start = self._cpu(peers), time.monotonic()
        play()
        wall, after = time.monotonic() - start, self._cpu(peers)
        spent = [late - early for early, late in zip(before, after, strict=True)]
        return Round(*(1e6 * seconds / self.count for seconds in (wall, *spent)))

    def _cpu(self, peers: tuple[Peer, Peer]) -> list[float]:
        return [*(peer.cpu() for peer in peers), sum(self._redis.cpu_times()[:4])]


class Peer:
    """One process and the pipe to it."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()
        self.answer()

    def tell(self, what: Any) -> Any:
        self.pipe.send(what)
        return self.answer()

    def answer(self) -> Any:
        """What it says; raises EOFError when it died."""
        return self.pipe.recv()

    def cpu(self) -> float:
        return sum(psutil.Process(self._process.pid).cpu_times()[:2])

    def rss(self) -> float:
        """Resident memory in bytes."""
        return float(psutil.Process(self._process.pid).memory_info().rss)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(None)
        self._process.join(10)
        self._process.kill()


def median(rounds: list[Round]) -> Round:
    """Of each column by itself."""
    return Round(*(statistics.median(column) for column in zip(*map(astuple, rounds), strict=True)))


def measure(tokens: int, repeats: int) -> Measured:
    """One length of trajectories, on a Redis of its own."""
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder), Path(folder) / "log")
        server.start()
        try:
            asyncio.run(create(server.url))
            bench = Bench(server, tokens)
            try:
                return bench.measure(repeats)
            finally:
                bench.close()
        finally:
            server.stop()


async def create(url: str, run_id: str = RUN_ID) -> None:
    runs = connect_runs(url)
    await runs.create(record_of(run_id))
    await runs.close()


def show(console: Console, measured: dict[int, Measured]) -> None:
    for tokens, one in measured.items():
        table = Table(title=f"one group of {GROUP_SIZE} x {tokens} tokens, microseconds (bare: {one.way})")
        for heading in ("path", "wall", "producer CPU", "consumer CPU", "Redis CPU", "trajectories/s", "MB/s"):
            table.add_column(heading, justify="left" if heading == "path" else "right")
        for name, path in (("real", one.real), ("bare", one.bare)):
            cells = (*astuple(path), GROUP_SIZE * 1e6 / path.wall, one.nbytes / path.wall)
            table.add_row(name, *(f"{cell:,.0f}" for cell in cells))
        console.print(table)
        for role, stages in one.stages.items():
            console.print(f"  {role}: " + ", ".join(f"{name} {spent:.0f}" for name, spent in stages.items()))
        console.print("  bare ways: " + "; ".join(f"{way} {wall:.0f}" for way, wall in one.tried.items()))


def main(argv: list[str]) -> int:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=9, help="interleaved rounds of each path (default 9)")
    given = parser.parse_args(argv)
    measured = {tokens: measure(tokens, given.repeats) for tokens in SIZES}
    show(Console(), measured)
    figures = {}
    for tokens, one in measured.items():
        rates = [1e6 / path.wall for path in (one.real, one.bare)]
        name = f"ratio_{tokens}"
        figures[name] = Figure(rates[0], "groups/s", rates[1], rates[0] / rates[1], BARS[name])
        plain = 1e6 / min(wall for way, wall in one.tried.items() if not way.hiredis)
        figures[f"{name}_plain"] = Figure(rates[0], "groups/s", plain, rates[0] / plain)
    most = max(one.nbytes / (GROUP_SIZE * tokens) for tokens, one in measured.items())
    figures["bytes_per_token"] = Figure(most, "bytes", bar=BARS["bytes_per_token"], at_most=True)
    return report("broker, two processes and one Redis", figures, json_file=given.json, check=given.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
