"""What lanes say of themselves, against what the operating system counted of their threads meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from audit import ledger
from audit.records import IDLE_PREFIX, Lane
from headrace.telemetry import clock
from tests.launches import Launches
from tests.tiny import save_tiny_llama

CONFIG = """
[run]
steps = 14

[model]
path = "{model}"
dtype = "float32"
context_length = 192

[[environments]]
name = "tests/e2e/environments.py:Counting"

[sampling]
max_new_tokens = 96

[producer]
slots = 16

[trainer]
groups_per_step = 4
group_size = 4
autocast = "off"

[staleness]
max_lag = 1
"""
WIDE = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6}
"""Large enough that products of matrices are most of what a step does."""
COMPUTE = ("prefill", "decode", "recompute", "forward_backward", "optimizer")
EVERY_S = 0.1
SURE = 0.95
"""Share of an interval in which the lane says one thing, from which on the interval is judged."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the operating system has counted of one process by a moment."""

    at: float
    """Seconds since the epoch."""
    threads: dict[int, float]
    """Processor time by thread."""
    free: float | None
    """Time in which the core that it is pinned to had nothing to do; None where it may take several."""


class Sampler:
    """Looks at two processes of a run from outside."""

    def __init__(self, launches: Launches) -> None:
        self._launches = launches
        self.samples: dict[int, list[Sample]] = {}

    def look(self) -> None:
        for part in ("trainer", "producer-1"):
            if self._launches.runs.exists() and self._launches.happened(part, "joined"):
                pid = self._launches.pid(part)
                try:
                    self.samples.setdefault(pid, []).append(self._sample(psutil.Process(pid)))
                except psutil.NoSuchProcess:
                    continue

    def _sample(self, process: psutil.Process) -> Sample:
        threads = {one.id: one.user_time + one.system_time for one in process.threads()}
        cores = process.cpu_affinity() or []
        free = None
        if len(cores) == 1:
            times = psutil.cpu_times(percpu=True)[cores[0]]
            free = times.idle + times.iowait
        return Sample(clock.now(), threads, free)


@dataclass(slots=True)
class Judged:
    """Of all intervals in which a lane said one thing."""

    seconds: float = 0.0
    cpu: float = 0.0
    available: float = 0.0
    """What the thread could have had: others may have taken the core."""


def judged(lane: Lane, thread: int, samples: list[Sample], *, idle: bool) -> Judged:
    found = Judged()
    for before, after in pairwise(samples):
        if thread not in before.threads or thread not in after.threads:
            continue
        wall = after.at - before.at
        said = lane.seconds(before.at, after.at)
        share = sum(s for phase, s in said.items() if (phase.startswith(IDLE_PREFIX) if idle else phase in COMPUTE))
        if share < SURE * wall:
            continue
        found.seconds += wall
        found.cpu += after.threads[thread] - before.threads[thread]
        spent = sum(after.threads.values()) - sum(before.threads.get(one, 0.0) for one in after.threads)
        free = after.free - before.free if after.free is not None and before.free is not None else None
        found.available += wall if free is None else min(wall, spent + free)
    return found


@pytest.fixture(scope="module")
def watched(module_launches: Launches, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sampler]:
    """A run that has ended, and what was seen of it."""
    launches = module_launches
    model = save_tiny_llama(tmp_path_factory.mktemp("wide"), **WIDE)
    file = launches.folder / "run.toml"
    file.write_text(CONFIG.format(model=model))
    process = launches.up("--config", str(file))
    sampler = Sampler(launches)
    deadline = time.monotonic() + 600
    while process.poll() is None:
        assert time.monotonic() < deadline, "the run does not end"
        sampler.look()
        time.sleep(EVERY_S)
    _, err = process.communicate()
    assert process.returncode == 0, err
    return launches.run, sampler


@pytest.mark.parametrize(("service", "name"), [("producer-1", "engine"), ("trainer", "trainer")])
def test_lanes_that_say_idle_are_idle_and_lanes_that_say_compute_compute(
    watched: tuple[Path, Sampler], service: str, name: str
) -> None:
    run, sampler = watched
    found = ledger.read(run)
    (lane,) = [lane for lane in found.lanes if (lane.service, lane.name) == (service, name)]
    thread, samples = found.threads[service, name, lane.pid], sampler.samples[lane.pid]
    idle = judged(lane, thread, samples, idle=True)
    compute = judged(lane, thread, samples, idle=False)
    print(f"{service}: idle {idle}, compute {compute}")
    assert idle.seconds > 0.5, "it never waited for long"
    assert compute.seconds > 0.5, "it never computed for long"
    assert idle.cpu < 0.1 * idle.seconds
    assert compute.cpu > 0.7 * compute.available


def test_a_lane_that_lies_is_found_out(watched: tuple[Path, Sampler]) -> None:
    """The same judgement of a lane that calls its waits decoding, and the other way round."""
    run, sampler = watched
    found = ledger.read(run)
    (lane,) = [lane for lane in found.lanes if (lane.service, lane.name) == ("producer-1", "engine")]
    swapped = {"decode": "wait_no_task", "wait_no_task": "decode", "wait_backpressure": "decode"}
    pieces = tuple(piece._replace(phase=swapped.get(piece.phase, piece.phase)) for piece in lane.pieces)
    liar = Lane(lane.service, lane.role, lane.name, lane.kind, lane.host, lane.pid, pieces)
    thread, samples = found.threads["producer-1", "engine", lane.pid], sampler.samples[lane.pid]
    idle = judged(liar, thread, samples, idle=True)
    assert idle.cpu > 0.1 * idle.seconds


def test_the_devices_time_is_all_accounted_for(watched: tuple[Path, Sampler]) -> None:
    run, sampler = watched
    for lane in ledger.read(run).lanes:
        if lane.is_device and lane.pid in sampler.samples:
            last = sampler.samples[lane.pid][-1].at
            assert lane.pieces[-1].end >= last - 1.0
            assert "lost" not in lane.seconds()
