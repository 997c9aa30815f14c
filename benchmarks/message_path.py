"""The real message path in two processes, as a run has it, with groups that are made beforehand instead of sampled."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from multiprocessing.connection import Connection as Pipe
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import uvloop

from broker.api import Fence, Hello, Peer, RunRecord
from broker.codec import decode_groups, encode_group
from broker.connect import Run, connect_run
from broker.messages import SCHEMA, Group, GroupDelivery, StepEntry, Task, TaskDelivery, Trajectory, VersionSpan
from headrace.config import Config
from headrace.config_trainer import TrainerConfig
from headrace.policy.memory import keep_freed_memory
from headrace.service import collect_seldom
from headrace.version import PolicyVersion

T = TypeVar("T")

VOCABULARY = 65_536
GROUP_SIZE = 8
POOL = 16
"""Different groups, sent in turn."""
WINDOW = 128
"""Groups that are admitted and not settled at most."""
SLOTS = 128
"""Tasks that the producer holds at most."""
LEASE_S = 10.0
BLOCK_MS = 1000
DEADLINE_MS = 3_600_000
VERSIONS = (PolicyVersion(1, 6), PolicyVersion(1, 7))
PRODUCER = "producer-0"
DIGESTS = {"model": "m" * 32, "tokenizer": "t" * 32, "chat_template": "c" * 32}


def record_of(run_id: str) -> RunRecord:
    config = Config(trainer=TrainerConfig(group_size=GROUP_SIZE)).model_dump(mode="json")
    return RunRecord(run_id, SCHEMA, config, DIGESTS, VOCABULARY, dataset_sizes={"train/random": POOL})


def pool(tokens: int) -> list[Group]:
    """Groups of random numbers; the same for a given length."""
    random = np.random.default_rng(tokens)
    return [_group(random, tokens, index) for index in range(POOL)]


def _group(random: np.random.Generator, tokens: int, index: int) -> Group:
    prompt = random.integers(0, VOCABULARY, tokens // 16)
    members = tuple(_trajectory(random, prompt, tokens) for _ in range(GROUP_SIZE))
    seconds = {"queue": 0.1, "decode": 30.0, "score": 0.2, "total": 30.3}
    return Group("", 1, "train", "random", index, PRODUCER, members, seconds=seconds)


def _trajectory(random: np.random.Generator, prompt: np.ndarray[Any, Any], tokens: int) -> Trajectory:
    sampled = tokens - prompt.size
    middle = prompt.size + int(random.integers(1, sampled))
    return Trajectory(
        token_ids_T=np.concatenate([prompt, random.integers(0, VOCABULARY, sampled)]).astype(np.int32),
        logprobs_T=np.concatenate([np.zeros(prompt.size), -random.exponential(1.0, sampled)]).astype(np.float32),
        loss_mask_T=np.arange(tokens) >= prompt.size,
        spans=(
            VersionSpan(prompt.size, middle, VERSIONS[0]),
            VersionSpan(middle, tokens, VERSIONS[1], "kept"),
        ),
        reward=float(random.integers(0, 2)),
        finish_reason="stop",
        correct=True,
    )


class Meter:
    """CPU seconds by stage. A stage inside another one is not counted in the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = 0.0

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        outer, self._inner = self._inner, 0.0
        start = time.thread_time()
        try:
            yield
        finally:
            spent = time.thread_time() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - self._inner
            self._inner = outer + spent

    def called(self, name: str, function: Callable[..., T]) -> Callable[..., T]:
        def measured(*args: Any) -> T:
            with self.stage(name):
                return function(*args)

        return measured

    def awaited(self, name: str, function: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
        return lambda *args: _Metered(self, name, function(*args))


class _Metered(Awaitable[T]):
    """An awaitable whose steps are counted."""

    def __init__(self, meter: Meter, name: str, inner: Awaitable[T]) -> None:
        self._meter, self._name, self._inner = meter, name, inner

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self._inner.__await__()
        step: Callable[..., Any] = next
        given: tuple[Any, ...] = (steps,)
        while True:
            try:
                with self._meter.stage(self._name):
                    waits_for = step(*given)
            except StopIteration as done:
                result: T = done.value
                return result
            try:
                step, given = steps.send, ((yield waits_for),)
            except BaseException as error:  # noqa: BLE001  (it is the inner one's to handle)
                step, given = steps.throw, (error,)


class Producer:
    """Takes tasks while it has free slots, plays each in a task of its own, renews its leases."""

    def __init__(self, run: Run, groups: list[Group]) -> None:
        self._run = run
        self._groups = itertools.cycle(groups)
        self._held: dict[str, asyncio.Task[None]] = {}
        self._freed = asyncio.Event()

    async def serve(self) -> None:
        """Until it is cancelled."""
        await self._run.join(Hello(PRODUCER, SCHEMA, DIGESTS, "localhost", 1))
        await self._run.heartbeat(Peer(PRODUCER, "producer", "localhost", 1, True, {}), LEASE_S)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._renew())
            while True:
                while len(self._held) >= SLOTS:
                    self._freed.clear()
                    await self._freed.wait()
                for delivery in await self._run.take(PRODUCER, SLOTS - len(self._held), BLOCK_MS):
                    self._held[delivery.entry_id] = group.create_task(self._play(delivery))

    async def _play(self, delivery: TaskDelivery) -> None:
        made = next(self._groups)
        names = delivery.task.task_id, delivery.attempt, made.kind, made.environment, made.index, PRODUCER
        group = Group(*names, made.trajectories, seconds=made.seconds)
        answer = await self._run.publish(PRODUCER, delivery, group)
        assert answer == "published", f"task {delivery.task.task_id} was {answer}"
        del self._held[delivery.entry_id]
        self._freed.set()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 4)
            await self._run.renew(PRODUCER, list(self._held))


class Trainer:
    """Admits up to the window, takes, judges, settles; the settling of what it has goes on beside the next read."""

    def __init__(self, run: Run, fence: Fence, count: int, deadline_ms: int, first: int) -> None:
        self._run, self._fence = run, fence
        self._left = count
        self._deadline_ms = deadline_ms
        self._numbers = itertools.count(first)
        self._open: set[str] = set()
        """Tasks that are admitted and have no group yet."""
        self.tokens = 0
        """Of all trajectories that arrived sound."""

    async def play(self, count: int, depth: int) -> None:
        await self._admit(WINDOW)
        settling = asyncio.create_task(asyncio.sleep(0))
        while count:
            verdicts = [self._judged(one) for one in await self._run.take_groups(self._fence, depth, BLOCK_MS)]
            count -= len(verdicts)
            await settling
            settling = asyncio.create_task(self._settle(verdicts))
        await settling

    def _judged(self, delivery: GroupDelivery) -> StepEntry:
        group = delivery.group
        assert group.outcome == "played", f"a group is {group.outcome}: {group.error}"
        self._open.remove(group.task_id)
        self.tokens += sum(len(one.token_ids_T) for one in group.trajectories)
        return StepEntry(delivery.entry_id, group.task_id, "trained")

    async def _settle(self, entries: list[StepEntry]) -> None:
        if entries:
            await self._run.settle(self._fence, entries)
            await self._admit(len(entries))

    async def _admit(self, most: int) -> None:
        count = min(most, self._left)
        self._left -= count
        if count:
            tasks = [self._task() for _ in range(count)]
            self._open.update(task.task_id for task in tasks)
            await self._run.admit(self._fence, tasks)

    def _task(self) -> Task:
        number = next(self._numbers)
        return Task(f"task-{number}", "train", "random", number, number, GROUP_SIZE, VERSIONS[0], self._deadline_ms, 7)


def settle_in() -> None:
    """What a service does at its start (`consumers/parts.py`, `headrace/service.py`)."""
    keep_freed_memory()
    collect_seldom()


def producer_process(pipe: Pipe, url: str, run_id: str, groups: list[Group]) -> None:
    """Serves until told None; told True it meters from then on, told False it answers what it metered."""

    async def serve() -> None:
        settle_in()
        run = connect_run(url, run_id)
        meter = Meter()
        told: asyncio.Queue[bool | None] = asyncio.Queue(2)
        asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: told.put_nowait(pipe.recv()))
        serving = asyncio.create_task(Producer(run, groups).serve())
        pipe.send(None)
        with contextlib.ExitStack() as metered:
            while (metering := await told.get()) is not None:
                if metering:
                    meter.seconds.clear()
                    for patch in _producer_stages(meter, run):
                        metered.enter_context(patch)
                    pipe.send(None)
                else:
                    metered.close()
                    pipe.send(meter.seconds)
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        await run.close()

    uvloop.run(serve())


def trainer_process(pipe: Pipe, url: str, run_id: str, depth: int) -> None:
    """For each (count, metered) one round, answered with its tokens and stages; ends when told None."""

    async def serve() -> None:
        settle_in()
        run = connect_run(url, run_id)
        fence = await run.take_fence(0)
        for version in VERSIONS:
            await run.publish_head(fence, version, b"")
        first = 0
        pipe.send(None)
        while job := await asyncio.to_thread(pipe.recv):
            count, metered = job
            meter = Meter()
            with contextlib.ExitStack() as stages:
                if metered:
                    for patch in _trainer_stages(meter, run):
                        stages.enter_context(patch)
                trainer = Trainer(run, fence, count, await run.now_ms() + DEADLINE_MS, first)
                await trainer.play(count, depth)
            first += count
            pipe.send((trainer.tokens, meter.seconds))
        await run.close()

    uvloop.run(serve())


def _producer_stages(meter: Meter, run: Run) -> list[Any]:
    return [
        mock.patch("broker.redis.producer.encode_group", meter.called("encode", encode_group)),
        *(mock.patch.object(run, name, meter.awaited(name, getattr(run, name))) for name in ("publish", "take")),
    ]


def _trainer_stages(meter: Meter, run: Run) -> list[Any]:
    stages = {"take_groups": "take", "settle": "settle", "admit": "admit"}
    return [
        mock.patch("broker.arrivals.decode_groups", meter.called("decode and check", decode_groups)),
        *(mock.patch.object(run, name, meter.awaited(stage, getattr(run, name))) for name, stage in stages.items()),
    ]
