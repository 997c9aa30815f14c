"""Evaluations as a trainer asks and settles them, on a broker in memory: beside training, and through deaths."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from broker.api import Balance, Fence, RunRecord
from broker.bounds import MAX_PINS
from broker.memory.runs import MemoryRun
from broker.memory.store import RunStore
from broker.messages import Group, TaskDelivery, Trajectory, VersionSpan
from consumers.admission import Window
from consumers.asking import Admitter
from consumers.batch import Batcher
from consumers.books import Books
from consumers.claim import Claim
from consumers.curriculum import Curriculum, Source
from consumers.evaluation import JOURNAL
from consumers.evaluations import Evaluations
from consumers.ingest import SeenTasks
from consumers.lag import History, Staleness
from consumers.lines import Lines
from consumers.progress import Progress
from headrace.config import Config
from headrace.errors import CheckpointError
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.phases import Lane
from headrace.version import PolicyVersion
from weightsync.manifest import Layout, Manifest, Part, encode

VERSION, NEXT = PolicyVersion(1, 4), PolicyVersion(1, 5)
PROMPTS = 3


def manifest(version: PolicyVersion) -> bytes:
    """A sealed one, on another host."""
    layout = Layout.of([("w", "float32", (4,))])
    return encode(Manifest(version, layout, (Part("elsewhere", "segment", (bytes(16),)),), True, "r"))


def played(delivery: TaskDelivery, reward: float, version: PolicyVersion) -> Group:
    """Two rollouts of this reward."""
    mask, spans = np.array([False, True]), (VersionSpan(1, 2, version),)
    one = Trajectory(np.zeros(2, np.int32), np.zeros(2, np.float32), mask, spans, reward, "stop")
    task = delivery.task
    return Group(task.task_id, delivery.attempt, task.kind, task.environment, task.index, "p", (one, one))


@dataclass
class Side:
    port: MemoryRun
    fence: Fence
    evaluations: Evaluations
    progress: Progress
    metrics: Metrics

    async def sheet(self) -> Balance:
        return next(sheet for sheet in await self.port.balance() if sheet.kind == "eval")

    async def take(self, count: int = 99) -> list[TaskDelivery]:
        return await self.port.take("p", count, 0)

    async def publish(self, *taken: TaskDelivery, version: PolicyVersion | None = None, reward: float = 1.0) -> None:
        for delivery in taken:
            group = played(delivery, reward, version or delivery.task.min_version)
            await self.port.publish("p", delivery, group)

    async def receive(self) -> None:
        for delivery in await self.port.take_groups(self.fence, 99, 0):
            await self.evaluations.receive(delivery)


Begin = Callable[..., Awaitable[Side]]


@pytest.fixture
def store(record: RunRecord) -> RunStore:
    tree = {"run": {"steps": 20}, "evaluation": {"prompts": PROMPTS, "samples_per_prompt": 2, "every": 4}}
    config = Config.model_validate(tree)
    return RunStore(replace(record, config=config.model_dump(mode="json")))


@pytest.fixture
def begin(store: RunStore, tmp_path: Path) -> Iterator[Begin]:
    """`await begin()` is a trainer, and each further one takes the run over."""
    opened = ExitStack()

    async def trainer(formed: int = 4) -> Side:
        config = Config.model_validate(store.record.config)
        port = MemoryRun(store.record.run_id, store, 3)
        fence = await port.take_fence(0)
        books = Books(fence.incarnation, formed, 0, Batcher(2, Staleness(2)))
        books.begin(History({}))
        claim, metrics = Claim(port, fence, books), Metrics("r", "trainer")
        progress = Progress(tmp_path, Lane("trainer", "load"), metrics, fence.incarnation, ("arithmetic",))
        opened.callback(progress.close)
        curriculum = Curriculum(0, (Source("arithmetic", 50),))
        admitter = Admitter(claim, config, Window(2, 2, 20), curriculum, SeenTasks(200))
        held_out = (Source("arithmetic", 5),)
        evaluations = Evaluations(claim, config, held_out, admitter, progress, lambda ids: "", tmp_path)
        opened.callback(evaluations.close)
        if fence.incarnation == 1:
            for version in (VERSION, NEXT):
                await port.publish_head(fence, version, manifest(version))
        return Side(port, fence, evaluations, progress, metrics)

    with opened:
        yield trainer


async def test_one_is_asked_pinned_answered_and_let_go(begin: Begin, tmp_path: Path) -> None:
    made = await begin()
    await made.evaluations.begin("step", VERSION)
    assert await made.port.pinned() == {VERSION}
    taken = await made.take()
    assert [(d.task.kind, d.task.min_version, d.task.group_size) for d in taken] == [("eval", VERSION, 2)] * PROMPTS
    await made.evaluations.begin("step", NEXT)
    assert not await made.take(), "one at a time"
    await made.publish(*taken[:2])
    await made.publish(taken[2], reward=0.0)
    await made.receive()
    assert made.evaluations.idle
    assert await made.port.pinned() == set()
    sheet = await made.sheet()
    assert (sheet.admitted, sheet.verdicts, sheet.outstanding) == (PROMPTS, {"evaluated": PROMPTS}, 0)
    result = made.evaluations.of(VERSION)
    assert (result.samples, result.accuracy, result.pass_at["1"]) == (6, pytest.approx(2 / 3), pytest.approx(2 / 3))
    (shown,) = made.evaluations.shown()["results"]
    assert (shown["version"], shown["samples"]) == ("1.4", 6)
    text = made.metrics.render().decode()
    assert 'headrace_evaluation_step{run="r",service="trainer"} 4.0' in text
    assert 'headrace_evaluation_accuracy{environment="arithmetic",run="r",service="trainer"} 0.666667' in text
    assert 'headrace_evaluation_pass_at{environment="arithmetic",k="2",run="r",service="trainer"} 0.666667' in text
    events = [json.loads(line)["event"] for line in (tmp_path / "trainer.jsonl").read_text().splitlines()]
    assert [event for event in events if event.startswith("evaluation")] == [
        "evaluation_begun",
        "evaluation_skipped",
        "evaluation",
    ]


async def test_mixed_rollouts_are_refused_and_their_prompts_asked_again(begin: Begin) -> None:
    made = await begin()
    await made.evaluations.begin("step", VERSION)
    first, *rest = await made.take()
    await made.publish(first, version=NEXT)
    await made.publish(*rest)
    await made.receive()
    assert not made.evaluations.idle
    (again,) = await made.take()
    assert again.task.task_id == f"{first.task.task_id}.1"
    assert (again.task.index, again.task.seed) == (first.task.index, first.task.seed)
    await made.publish(again)
    await made.receive()
    sheet = await made.sheet()
    assert sheet.verdicts == {"evaluated": PROMPTS, "filtered": 1}
    assert (sheet.closed, sheet.outstanding, made.evaluations.of(VERSION).samples) == (True, 0, 6)


@pytest.mark.parametrize("settles", [True, False])
async def test_a_trainer_that_was_killed_is_gone_on_from_and_nothing_counts_twice(begin: Begin, settles: bool) -> None:
    """Killed with an answer written (and settled, or not), one group on its way, and one task at a producer."""
    first = await begin()
    await first.evaluations.begin("step", VERSION)
    one, two, three = await first.take()
    await first.publish(one)
    if not settles:

        async def dies(*_: object) -> None:
            return

        first.port.settle = dies  # type: ignore[method-assign]
    await first.receive()
    await first.publish(two)

    second = await begin()
    assert second.evaluations.missing == 2
    for delivery in await second.port.open_groups(second.fence):
        await second.evaluations.receive(delivery)
    await second.evaluations.resume()
    assert not await second.take(), "what is outstanding is not asked again"
    await second.publish(three)
    await second.receive()
    assert second.evaluations.idle
    sheet = await second.sheet()
    assert (sheet.admitted, sheet.verdicts, sheet.outstanding) == (PROMPTS, {"evaluated": PROMPTS}, 0)
    assert second.evaluations.of(VERSION).samples == 6
    assert await second.port.pinned() == set()
    third = await begin()
    assert third.evaluations.of(VERSION).samples == 6
    assert not third.evaluations.missed(4)


async def test_killed_between_the_begin_and_its_tasks_the_tasks_are_asked_by_the_next(begin: Begin) -> None:
    first = await begin()

    async def dies(*_: object) -> None:
        raise ConnectionError

    first.port.admit = dies  # type: ignore[assignment, method-assign]
    with pytest.raises(ConnectionError):
        await first.evaluations.begin("step", VERSION)
    second = await begin()
    await second.evaluations.resume()
    assert len(await second.take()) == PROMPTS
    assert await second.port.pinned() == {VERSION}


async def test_an_evaluation_whose_version_is_gone_is_given_up(begin: Begin) -> None:
    first = await begin()
    await first.evaluations.begin("step", VERSION)
    await first.port.forget(VERSION)
    second = await begin()
    assert second.evaluations.missing == PROMPTS
    await second.evaluations.resume()
    assert second.evaluations.idle
    assert await second.port.pinned() == set()
    assert second.evaluations.missed(5), "another version stands in for it"
    await second.publish(*await second.take())
    await second.receive()
    assert (await second.sheet()).verdicts == {"superseded": PROMPTS}
    third = await begin()
    assert third.evaluations.idle


async def test_a_pin_of_somebody_else_stays(begin: Begin) -> None:
    made = await begin()
    await made.port.pin(VERSION)
    await made.evaluations.begin("step", VERSION)
    await made.publish(*await made.take())
    await made.receive()
    assert await made.port.pinned() == {VERSION}


async def test_where_no_pin_is_left_it_is_evaluated_as_long_as_it_is_there(begin: Begin, tmp_path: Path) -> None:
    made = await begin()
    for step in range(MAX_PINS):
        await made.port.pin(PolicyVersion(0, step))
    await made.evaluations.begin("step", VERSION)
    assert len(await made.take()) == PROMPTS
    assert "evaluation_not_pinned" in (tmp_path / "trainer.jsonl").read_text()


async def test_a_redis_that_lost_its_manifests_hears_of_the_version_again(begin: Begin, store: RunStore) -> None:
    made = await begin()
    await made.evaluations.begin("step", VERSION)
    one, *_ = await made.take()
    await made.publish(one)
    await made.receive()
    store.manifests.clear()
    await made.evaluations.announce_again()
    assert await made.port.manifest(VERSION) == manifest(VERSION)
    assert await made.port.head() == NEXT


async def test_without_room_on_the_disk_nothing_is_settled(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await begin()
    await made.evaluations.begin("step", VERSION)
    taken = await made.take()
    full = True
    write = Lines.flush

    def flush(lines: Lines) -> None:
        if full:
            lines.trouble = "no space left on device"
        else:
            write(lines)

    monkeypatch.setattr(Lines, "flush", flush)
    await made.publish(*taken)
    await made.receive()
    assert (await made.sheet()).outstanding == PROMPTS
    assert made.evaluations.trouble
    full = False
    await made.evaluations.flush()
    assert (await made.sheet()).verdicts == {"evaluated": PROMPTS}
    assert not made.evaluations.trouble


async def test_when_evaluations_are_due(begin: Begin) -> None:
    made = await begin(formed=0)
    assert made.evaluations.wants_before()
    assert [step for step in range(25) if made.evaluations.due(step)] == [4, 8, 12, 16]
    assert [step for step in range(10) if made.evaluations.missed(step)] == [4, 5, 6, 7, 8, 9]
    await made.evaluations.begin("step", VERSION)
    assert not made.evaluations.missed(5), "it goes on"
    await made.publish(*await made.take())
    await made.receive()
    assert not made.evaluations.wants_before()
    assert [step for step in range(10) if made.evaluations.missed(step)] == [8, 9]
    assert made.evaluations.wants_after(None)
    assert not made.evaluations.wants_after(VERSION), "the same weights by another name"


async def test_a_damaged_journal_ends_the_trainer_with_a_sentence(begin: Begin, tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_text('{"event": "begin"}\n')
    with pytest.raises(CheckpointError, match=r"remove it to evaluate again"):
        await begin()
