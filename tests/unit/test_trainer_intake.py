"""What the trainer asks and what it does with the answers, on a broker in memory."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.api import Balance, Peer, RunRecord
from broker.memory.runs import MemoryRun
from broker.memory.store import RunStore
from broker.messages import Group, GroupDelivery, TaskDelivery, Trajectory, VersionSpan
from consumers.admission import Window
from consumers.asking import Admitter
from consumers.batch import Batcher
from consumers.books import Books
from consumers.claim import Claim
from consumers.curriculum import Curriculum, Source
from consumers.evaluation import MOST_ASKED
from consumers.evaluations import Evaluations
from consumers.ingest import SeenTasks
from consumers.intake import LATE, NEEDLESS, NO_SIGNAL, Intake
from consumers.lag import History, Staleness
from consumers.progress import Progress
from consumers.troubles import Troubles
from consumers.watch import Watch
from headrace.config import Config
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.phases import Lane
from headrace.version import PolicyVersion

STEPS = 20


class ForgetfulRun(MemoryRun):
    """A broker that was made whole once more whenever `forgets` is set."""

    forgets = 0

    @property
    def mended(self) -> int:
        return self.forgets


@dataclass
class Side:
    """A trainer's side without a model."""

    port: ForgetfulRun
    claim: Claim
    admitter: Admitter
    intake: Intake
    seen: SeenTasks
    progress: Progress
    evaluations: Evaluations

    @property
    def books(self) -> Books:
        return self.claim.books

    async def balance(self, kind: str = "train") -> Balance:
        return next(sheet for sheet in await self.port.balance() if sheet.kind == kind)

    async def play(self, count: int = 99, *, step: int | None = None, outcome: str = "played") -> list[TaskDelivery]:
        """Take and publish so many tasks, sampled on the given step or on the oldest that is allowed."""
        taken = await self.port.take("p", count, 0)
        for delivery in taken:
            version = delivery.task.min_version if step is None else PolicyVersion(1, step)
            await self.port.publish("p", delivery, played(delivery, version, outcome))
        return taken

    async def train(self) -> list[str]:
        """As many steps as can be made, all of them settled; returns their tasks."""
        trained: list[str] = []
        while (batch := await self.intake.form()) is not None:
            assert max(batch.lags) <= 2
            for item in batch.trained:
                self.seen.judge(item.task_id, item.verdict)
                trained.append(item.task_id)
            await self.port.settle(self.claim.fence, list(batch.trained))
            self.books.settled(1)
        return trained


def played(delivery: TaskDelivery, version: PolicyVersion, outcome: str = "played", other: float = 1.0) -> Group:
    """Two rollouts, of reward 1 and `other`."""
    mask = np.array([False, True])
    one = Trajectory(np.zeros(2, np.int32), np.zeros(2, np.float32), mask, (VersionSpan(1, 2, version),), 1.0, "stop")
    common = {
        "task_id": delivery.task.task_id,
        "attempt": delivery.attempt,
        "kind": delivery.task.kind,
        "environment": delivery.task.environment,
        "index": delivery.task.index,
        "producer": "p",
    }
    if outcome == "played":
        return Group(**common, trajectories=(one, replace(one, reward=other)))
    return Group(**common, trajectories=(), outcome=outcome, error=f"{outcome} by rule")


async def begun(record: RunRecord, folder: Path, **sections: dict[str, object]) -> Side:
    tree: dict[str, dict[str, object]] = {
        "run": {"steps": STEPS},
        "trainer": {"groups_per_step": 2, "group_size": 2},
        "staleness": {"max_lag": 2, "requeue": 1},
        "evaluation": {"samples_per_prompt": 2},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    config = Config.model_validate(tree)
    record = replace(record, config=config.model_dump(mode="json"))
    port = ForgetfulRun(record.run_id, RunStore(record), 3)
    fence = await port.take_fence(0)
    rule = Staleness(config.staleness.max_lag, config.staleness.stale == "mask")
    books = Books(fence.incarnation, 0, 0, Batcher(2, rule))
    books.begin(History({}))
    for step in range(STEPS + 1):
        await port.publish_head(fence, PolicyVersion(1, step), b"manifest")
    claim, seen = Claim(port, fence, books), SeenTasks(200)
    window = Window(2, config.staleness.max_lag, STEPS)
    admitter = Admitter(claim, config, window, Curriculum(0, (Source("arithmetic", 50),)), seen)
    progress = Progress(folder, Lane("trainer", "load"), Metrics("r", "trainer"), 1, ("arithmetic",))
    replaced = config.trainer.dynamic_sampling * window.groups_per_step
    evaluations = Evaluations(claim, config, (Source("arithmetic", 5),), admitter, progress, str, folder)
    intake = Intake(claim, admitter, evaluations, progress, seen, window.slots, replaced)
    return Side(port, claim, admitter, intake, seen, progress, evaluations)


Begin = Callable[..., Awaitable[Side]]


@pytest.fixture
async def side(record: RunRecord, tmp_path: Path) -> AsyncIterator[Begin]:
    """`await side(staleness={…})` begins a run."""
    made: list[Side] = []

    async def begin(**sections: dict[str, object]) -> Side:
        made.append(await begun(record, tmp_path, **sections))
        return made[-1]

    yield begin
    for one in made:
        one.progress.close()
        one.evaluations.close()


async def test_the_cursor_goes_along_with_what_is_admitted(side: Begin) -> None:
    made = await side()
    assert await made.admitter.fill() == 4
    assert (made.books.cursor, (await made.port.state()).cursor) == (4, 4)
    assert await made.admitter.fill() == 0


async def test_a_broker_that_has_just_been_made_whole_is_asked_again(side: Begin) -> None:
    """What it counted before it was whole may be too few."""
    made = await side()
    balance = made.port.balance

    async def forgets() -> list[Balance]:
        made.port.forgets += 1
        return await balance()

    made.port.balance = forgets  # type: ignore[method-assign]
    assert await made.admitter.fill() == 0
    assert made.books.slots.is_set()
    made.port.balance = balance  # type: ignore[method-assign]
    assert await made.admitter.fill() == 4


async def test_stale_prompts_are_asked_again_before_new_ones_as_often_as_they_may(side: Begin) -> None:
    made = await side()
    await made.admitter.fill()
    first = await made.play()
    await made.intake.take(0)
    made.books.formed = 3
    assert await made.intake.form() is None
    again = await made.port.take("p", 99, 0)
    assert [delivery.task.task_id for delivery in again] == [f"{delivery.task.task_id}.1" for delivery in first]
    for old, new in zip(first, again, strict=True):
        assert (old.task.index, old.task.seed) == (new.task.index, new.task.seed)
        assert new.task.min_version == PolicyVersion(1, 2)
    sheet = await made.balance()
    assert (sheet.outstanding, sheet.verdicts) == (4, {"stale": 4})
    assert await made.admitter.fill() == 0, "they have the slots of the stale ones"

    for delivery in again:
        await made.port.publish("p", delivery, played(delivery, PolicyVersion(1, 2), "stale"))
    await made.intake.take(0)
    sheet = await made.balance()
    assert (sheet.outstanding, sheet.verdicts, sheet.reasons["stale: stale by rule"]) == (0, {"stale": 8}, 4)
    assert await made.admitter.fill() == 4, "asked once more at most: now new ones come"
    assert (await made.port.take("p", 1, 0))[0].task.task_id == "train-00000004"


async def test_nothing_is_asked_again_when_it_is_turned_off_or_no_step_is_left(side: Begin) -> None:
    for requeue, formed in ((0, 3), (1, STEPS)):
        made = await side(staleness={"requeue": requeue})
        await made.admitter.fill()
        await made.play(outcome="stale")
        made.books.formed = formed
        await made.intake.take(0)
        assert (await made.balance()).outstanding == 0


async def test_what_a_rollback_left_over_is_settled_after_the_last_step(side: Begin) -> None:
    """One group waits for a batch, one for the intake, one is played, and one task for a producer."""
    made = await side()
    await made.admitter.fill()
    waiting, coming, _playing = await made.port.take("p", 3, 0)
    await made.port.publish("p", waiting, played(waiting, PolicyVersion(1, 0)))
    await made.intake.take(0)
    await made.port.publish("p", coming, played(coming, PolicyVersion(1, 0)))
    made.books.formed = STEPS
    await made.intake.forgo()
    sheet = await made.balance()
    assert (sheet.outstanding, sheet.verdicts) == (1, {"filtered": 3})
    assert len(made.books.batcher) == made.books.batcher.nbytes == 0
    await made.intake.take(0)
    sheet = await made.balance()
    assert (sheet.outstanding, sheet.reasons) == (0, {f"filtered: {NEEDLESS}": 4})
    assert await made.admitter.fill() == 0


async def test_a_second_group_gets_the_verdict_of_its_task(side: Begin) -> None:
    made = await side()
    await made.admitter.fill()
    failing, held = await made.port.take("p", 2, 0)
    await made.port.publish("p", failing, played(failing, PolicyVersion(1, 0), "failed"))
    await made.port.publish("p", held, played(held, PolicyVersion(1, 0)))
    await made.intake.take(0)
    assert len(made.books.batcher) == 1
    settled: list[tuple[str, str]] = []
    settle = made.port.settle

    async def noted(fence: object, entries: list[object]) -> None:
        settled.extend((item.entry_id, item.verdict) for item in entries)  # type: ignore[attr-defined]
        await settle(fence, entries)  # type: ignore[arg-type]

    made.port.settle = noted  # type: ignore[assignment, method-assign]
    for delivery in (failing, held):
        await made.intake.receive(GroupDelivery("99-0", 5, played(delivery, PolicyVersion(1, 0))))
    assert settled == [("99-0", "failed")], "what is held is settled once, by its first entry"
    assert len(made.books.batcher) == 1
    assert (await made.balance()).verdicts == {"failed": 1}


async def test_tasks_that_nobody_finishes_fail_by_rule(side: Begin) -> None:
    made = await side(evaluation={"prompts": 2})
    await made.admitter.fill()
    await made.evaluations.begin("before", PolicyVersion(1, 0))
    stuck = await made.port.take("p", 99, 0)
    assert len(stuck) == 6
    held = next(delivery for delivery in stuck if delivery.task.kind == "train")
    await made.intake.receive(GroupDelivery("1-0", 5, played(held, PolicyVersion(1, 0))))
    await made.intake.give_up([delivery.task for delivery in stuck])
    for _ in range(MOST_ASKED - 1):
        assert not made.evaluations.idle, "held-out prompts are asked again"
        again = await made.port.take("p", 99, 0)
        assert len(again) == 2
        await made.intake.give_up([delivery.task for delivery in again])
    assert [result["failed"] for result in made.evaluations.all()] == [2]
    train, evaluation = await made.balance(), await made.balance("eval")
    assert (train.outstanding, train.reasons) == (1, {f"failed: {LATE}": 3})
    assert (evaluation.outstanding, evaluation.verdicts) == (0, {"failed": 2 * MOST_ASKED})
    late = next(delivery for delivery in stuck if delivery is not held)
    assert await made.port.publish("p", late, played(late, PolicyVersion(1, 0))) == "superseded"


async def test_a_run_in_which_everything_fails_ends(side: Begin) -> None:
    made = await side()

    async def fail() -> None:
        await made.admitter.fill()
        await made.play(outcome="failed")
        await made.intake.take(0)

    for _ in range(9):
        await fail()
    assert made.intake.hopeless == ""
    assert not made.intake.arrived.is_set()
    await fail()
    assert made.intake.hopeless == "the last 40 groups all failed; the newest: failed by rule"
    assert made.intake.arrived.is_set(), "who waits for groups is woken"
    await made.admitter.fill()
    await made.play(1)
    await made.intake.take(0)
    assert made.intake.hopeless == "", "one that can be used is reason to go on"


async def test_groups_without_signal_are_replaced_by_new_prompts_up_to_a_bound(side: Begin) -> None:
    """Steps of 2 groups, of which 4 may be replaced; 4 slots."""
    made = await side(trainer={"dynamic_sampling": 2})
    version = PolicyVersion(1, 0)
    await made.admitter.fill()
    first = await made.port.take("p", 99, 0)
    for delivery, other in zip(first, (1.0, 0.0, 1.0, 1.0), strict=True):
        await made.port.publish("p", delivery, played(delivery, version, other=other))
    await made.intake.take(0)
    sheet = await made.balance()
    assert (len(made.books.batcher), sheet.outstanding) == (1, 1)
    assert (sheet.verdicts, sheet.reasons) == ({"filtered": 3}, {f"filtered: {NO_SIGNAL}": 3})
    assert sheet.closed
    assert made.books.slots.is_set(), "who admits is woken"

    assert await made.admitter.fill() == 3
    again = await made.port.take("p", 99, 0)
    assert {delivery.task.index for delivery in again}.isdisjoint(delivery.task.index for delivery in first)
    for delivery in again[:2]:
        await made.port.publish("p", delivery, played(delivery, version))
    await made.intake.take(0)
    assert (await made.balance()).verdicts == {"filtered": 4}, "the fifth is taken as it is"
    assert len(await made.train()) == 2

    await made.port.publish("p", again[2], played(again[2], version))
    await made.intake.take(0)
    sheet = await made.balance()
    assert sheet.verdicts == {"filtered": 5, "trained": 2}, "the next step may replace as many"
    assert sheet.closed


async def test_groups_without_signal_are_taken_where_nothing_else_was_asked_for(side: Begin) -> None:
    made = await side()
    await made.admitter.fill()
    await made.play()
    await made.intake.take(0)
    assert len(made.books.batcher) == 4


@dataclass
class Turns:
    """Things that happen to a run, in any order."""

    side: Side
    trained: list[str] = field(default_factory=list)
    newest: GroupDelivery | None = None

    async def turn(self, act: str, count: int) -> None:
        side = self.side
        if act == "fill":
            await side.admitter.fill()
        elif act == "take":
            for delivery in await side.port.take_groups(side.claim.fence, 9, 0):
                self.newest = delivery
                await side.intake.receive(delivery)
        elif act == "train":
            self.trained += await side.train()
        elif act == "twice" and self.newest is not None:
            await side.intake.receive(replace(self.newest, entry_id="99-0"))
        elif act in ("stale", "failed"):
            await side.play(count, outcome=act)
        elif act in ("old", "new"):
            await side.play(count, step=side.books.formed if act == "new" else None)


acts = st.sampled_from(["fill", "old", "new", "stale", "failed", "take", "train", "twice"])


@settings(max_examples=60)
@given(
    st.lists(st.tuples(acts, st.integers(1, 3)), max_size=60),
    st.sampled_from(["drop", "mask"]),
    st.sampled_from([0, 1]),
)
async def test_every_task_has_one_verdict_and_the_slots_are_kept(
    turns: list[tuple[str, int]], stale: str, dynamic: int
) -> None:
    digests = {"model": "m" * 32, "tokenizer": "t" * 32, "chat_template": "c" * 32}
    record = RunRecord("sides", 2, {}, digests, vocab_size=100, dataset_sizes={"train/arithmetic": 50})
    with tempfile.TemporaryDirectory() as folder:
        run = Turns(
            await begun(record, Path(folder), staleness={"stale": stale}, trainer={"dynamic_sampling": dynamic})
        )
        for act, count in turns:
            await run.turn(act, count)
            sheet = await run.side.balance()
            assert sheet.closed
            assert sheet.outstanding <= 4
            assert len(run.trained) == len(set(run.trained)) == sheet.verdicts.get("trained", 0)
        run.side.progress.close()
        run.side.evaluations.close()


async def test_a_trainer_that_leaves_does_not_miss_the_producers_that_leave_too(side: Begin) -> None:
    made = await side()
    troubles = Troubles()
    watch = Watch(made.claim, Config(), made.progress, troubles)
    await made.port.heartbeat(Peer("p", "producer", "here", 1, True, {}), 60.0)
    await watch.look(leaving=False)
    await made.port.retire("p")
    await watch.look(leaving=True)
    assert troubles.shown() == []
    await watch.look(leaving=False)
    assert [trouble["kind"] for trouble in troubles.shown()] == ["producers"]
