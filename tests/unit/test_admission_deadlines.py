"""Deadlines of admitted tasks are on the broker's clock, whatever the trainer's machine says."""

from __future__ import annotations

from broker.api import RunRecord
from broker.memory.runs import MemoryRun
from broker.memory.store import RunStore
from broker.messages import Task
from consumers.admission import Window
from consumers.asking import Admitter
from consumers.batch import Batcher
from consumers.books import Books
from consumers.claim import Claim
from consumers.curriculum import Curriculum, Source
from consumers.ingest import SeenTasks
from consumers.lag import History, Staleness
from headrace.config import Config

AHEAD_MS = 10**15


class FarAhead(MemoryRun):
    """A broker on a machine whose clock is far ahead."""

    async def now_ms(self) -> int:
        return AHEAD_MS


async def test_deadlines_are_on_the_brokers_clock(record: RunRecord) -> None:
    port = FarAhead(record.run_id, RunStore(record), 3)
    config = Config.model_validate({"broker": {"task_deadline_s": 60}})
    books = Books(1, 0, 0, Batcher(2, Staleness(1)))
    books.begin(History({}))
    curriculum = Curriculum(0, (Source("arithmetic", 8),))
    claim = Claim(port, await port.take_fence(0), books)
    admitter = Admitter(claim, config, Window(2, 1, 10), curriculum, SeenTasks(9))
    assert await admitter.deadline_ms() == AHEAD_MS + 60_000
    assert await admitter.fill() == 2
    tasks: list[Task] = [delivery.task for delivery in await port.take("p0", 8, 0)]
    assert [(task.kind, task.deadline_ms) for task in tasks] == [
        ("train", AHEAD_MS + 60_000),
        ("train", AHEAD_MS + 60_000),
    ]
