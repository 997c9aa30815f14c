"""A whole producer against a real broker: scripted engine, real reward processes, real weight versions."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import redis.asyncio as aioredis
import torch

from audit import ledger
from broker.api import Order
from broker.connect import connect_runs
from broker.keys import Keys
from broker.validate import Limits, check_group
from headrace.errors import ModelError, Refused
from headrace.invocation import Invocation
from headrace.service import Service
from producers.start import start
from tests.producers import BROKER, Setting, counted, metrics
from tests.support import RedisProcess, wait_until

torch.set_num_threads(1)

LIMITS = Limits(256, {"train": 4, "eval": 3})

ENVIRONMENT = """
import time
from producers.environments.single_turn import SingleTurn

class Own:
    def __len__(self): return 8
    def eval_size(self): return 2
    def episode(self, split, index, seed): return SingleTurn("x" * 500 if index == 7 else "?", index)
    async def score(self, rollout):
        if rollout.index == 1: raise ValueError("no reward for you")
        if rollout.index == 2: time.sleep(600)
        return 1.0
    def correct(self, rollout): return rollout.index == 0
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(ENVIRONMENT)
    return f"{tmp_path}/own.py:Own"


async def test_tasks_become_groups(setting: Setting, tmp_path: Path) -> None:
    scene = await setting(folder=str(tmp_path))
    names = [f"task-{number}" for number in range(12)]
    async with scene.producer() as producer:
        await scene.trainer.admit(*names)
        await scene.trainer.admit("exam-1", kind="eval", group_size=3)
        await wait_until(lambda: producer.gauges.host.phase == "wait_start", "it waits for a version")
        assert await scene.held() == 0
        await scene.trainer.publish(0)
        await scene.trainer.receive(*names, "exam-1")
        assert "headrace_groups_total" in await metrics(producer)
        await wait_until(lambda: bool(producer.gauges.published == 13), "all are published")

    for name, delivery in scene.trainer.groups.items():
        group = delivery.group
        assert check_group(group, LIMITS) is None
        assert (group.error, group.failures, group.producer, group.attempt) == ("", (), "p1", 1)
        assert len(group.trajectories) == (3 if name == "exam-1" else 4)
        assert {span.version for member in group.trajectories for span in member.spans} == {scene.trainer.version(0)}
    prompts = {bytes(d.group.trajectories[0].token_ids_T[:17].astype("u1")) for d in scene.trainer.groups.values()}
    assert len(prompts) == 13
    journal = (tmp_path / "p1.jsonl").read_text()
    assert journal.count('"event": "group"') == 13
    found = {lane.name: lane for lane in ledger.read(tmp_path).lanes}
    assert found.keys() == {"engine", "host", "score/arithmetic/0"}
    assert "lost" not in found["engine"].seconds()
    assert {"wait_start", "decode", "wait_no_task"} <= found["engine"].seconds().keys()
    assert '"event": "state"' in journal
    balance = {sheet.kind: sheet for sheet in await scene.trainer.port.balance()}
    assert all(sheet.closed for sheet in balance.values())
    assert await scene.peer("p1") == {}


async def test_without_the_runs_folder_heartbeats_carry_what_the_lanes_did(setting: Setting) -> None:
    scene = await setting()
    async with scene.producer():
        await scene.trainer.publish(0)
        await scene.trainer.admit("task-1")
        await scene.trainer.receive("task-1")

        async def said() -> bool:
            lanes = {lane["lane"]: lane for lane in (await scene.peer("p1")).get("lanes", [])}
            return "decode" in lanes.get("engine", {}).get("sums", {})

        await wait_until(said, "a heartbeat says that the engine has decoded")
        state = await scene.peer("p1")
    (engine,) = [lane for lane in state["lanes"] if lane["lane"] == "engine"]
    assert (engine["kind"], engine["device"], engine["devices"]) == ("device", "simulated", 1)
    # Read a moment later.
    assert all(engine["sums"][phase] >= spent - 0.001 for phase, spent in state["seconds"].items())
    assert {lane["lane"] for lane in state["lanes"]} == {"engine", "host", "score/arithmetic/0"}


async def test_a_task_waits_for_the_version_that_it_asks_for(setting: Setting) -> None:
    scene = await setting()
    await scene.trainer.publish(0)
    async with scene.producer() as producer:
        await scene.trainer.admit("early")
        await scene.trainer.receive("early")
        await scene.trainer.admit("late", step=2)
        await wait_until(
            lambda: [job.delivery.task.task_id for job in producer.jobs.held.values()] == ["late"],
            "the early task is done and the late one taken",
        )
        assert (producer.jobs.phase(), producer.jobs.room()) == ("wait_behind_on_weights", 0)
        await scene.trainer.admit("another")
        await scene.trainer.publish(1)
        await wait_until(lambda: producer.version == scene.trainer.version(1), "version 1 is committed")
        assert producer.jobs.room() == 0
        assert next(iter(producer.jobs.held.values())).delivery.task.task_id == "late"
        await scene.trainer.publish(2)
        await scene.trainer.receive("late", "another")
    late = scene.trainer.groups["late"].group
    assert {span.version for member in late.trajectories for span in member.spans} == {scene.trainer.version(2)}


async def test_what_fails_fails_with_its_reason_and_the_run_goes_on(setting: Setting, own: str) -> None:
    scene = await setting(own)
    await scene.trainer.publish(0)
    async with scene.producer():
        await scene.trainer.admit("raises-1", "hangs-2", "long-7", "fine-3", "exam-0", "exam-1")
        await scene.trainer.admit("held-0", "held-1", kind="eval", group_size=3)
        await scene.trainer.admit("foreign", environment="other")
        names = ("raises-1", "hangs-2", "long-7", "fine-3", "exam-0", "exam-1", "held-0", "held-1", "foreign")
        await scene.trainer.receive(*names)
    groups = {name: delivery.group for name, delivery in scene.trainer.groups.items()}
    assert groups["raises-1"].error == "4 of 4 rollouts failed: reward raised ValueError: no reward for you"
    assert groups["raises-1"].failures == ("reward raised ValueError: no reward for you",) * 4
    assert groups["hangs-2"].error == "4 of 4 rollouts failed: reward took longer than 1 s"
    assert "prompt of 501 tokens leaves no room for an answer in a context of 128" in groups["long-7"].error
    assert "environment 'other' is not one of the run's" in groups["foreign"].error
    assert [member.reward for member in groups["fine-3"].trajectories] == [1.0] * 4
    assert [member.reward for member in groups["held-0"].trajectories] == [1.0] * 3
    assert [member.reward for member in groups["held-1"].trajectories] == [0.0] * 3


async def test_the_deadline_of_a_task_ends_it(setting: Setting) -> None:
    scene = await setting(step_s=0.5, length_mean=1000.0, length_sigma=0.0)
    await scene.trainer.publish(0)
    async with scene.producer() as producer:
        await wait_until(lambda: producer.version is not None, "it has a version")
        now_ms = await scene.trainer.port.now_ms()
        await scene.trainer.admit("slow", deadline_ms=now_ms + 2000)
        await scene.trainer.admit("never", step=5, deadline_ms=now_ms + 2000)
        await scene.trainer.receive("slow", "never")
        assert producer.jobs.stage.player.engine.stats().busy_slots == 0
    errors = {name: delivery.group.error for name, delivery in scene.trainer.groups.items()}
    assert errors["slow"] == "4 of 4 rollouts failed: the task's deadline passed: it was still playing"
    assert errors["never"] == f"the task's deadline passed: no version {scene.trainer.version(5)} came"


async def test_a_drain_finishes_what_plays_and_takes_nothing_more(setting: Setting) -> None:
    scene = await setting(step_s=0.01, length_mean=32.0)
    await scene.trainer.publish(0)
    names = [f"task-{number}" for number in range(30)]
    async with scene.producer() as producer:
        await scene.trainer.admit(*names)
        await wait_until(lambda: len(producer.jobs.held) >= 2, "tasks are held")
        producer._obey(Order("1-0", "drain", target="somebody else"))
        assert not producer.service.stopping.is_set()
        await scene.trainer.port.order(Order("", "drain", target="p1"))
        await wait_until(producer.service.stopping.is_set, "the order has come")
        playing = [held.delivery.task.task_id for held in producer.jobs.held.values()]
        await scene.trainer.receive(*playing)
    depths = await scene.trainer.port.depths()
    assert depths.tasks_held == 0
    assert depths.tasks_waiting == 30 - len(scene.trainer.groups) > 0


async def test_the_end_of_the_run_ends_the_producer(setting: Setting) -> None:
    scene = await setting(step_s=1.0)
    await scene.trainer.publish(0)
    async with scene.producer() as producer:
        await scene.trainer.admit("task-1")
        await wait_until(lambda: len(producer.jobs.held) == 1, "the task is held")
        await scene.trainer.port.finish(scene.trainer.fence, "finished", "all steps are done")
        await wait_until(producer.service.stopping.is_set, "the producer has heard of it")
    with pytest.raises(Refused, match="the run is finished: all steps are done; a producer has nothing to do"):
        await start(Service("p2"), Invocation(scene.url, scene.record.run_id, "p2"))


async def test_what_outlives_the_drain_is_given_back(setting: Setting, processes: list[subprocess.Popen[str]]) -> None:
    scene = await setting(step_s=5.0)
    await scene.trainer.publish(0)
    await scene.trainer.admit("task-1", "task-2", "task-3")
    leaving = scene.process("leaving")
    processes.append(leaving)
    await wait_until(lambda: _is(scene.held(), 3), "all tasks are held")
    await scene.trainer.port.order(Order("", "stop", target="leaving"))
    assert await asyncio.to_thread(leaving.wait, 30) == 0
    assert (await scene.trainer.port.depths()).tasks_held == 0
    assert (await scene.trainer.port.depths()).tasks_waiting == 3


async def _is(value: Awaitable[int], wanted: int) -> bool:
    return await value == wanted


async def test_a_killed_producer_is_replaced_by_another(
    setting: Setting, processes: list[subprocess.Popen[str]]
) -> None:
    scene = await setting(step_s=0.05, length_mean=32.0)
    await scene.trainer.publish(0)
    names = [f"task-{number}" for number in range(6)]
    await scene.trainer.admit(*names)
    dying = scene.process("dying")
    processes.append(dying)
    await wait_until(lambda: _is(scene.held(), 3), "tasks are held")
    dying.send_signal(signal.SIGKILL)
    await asyncio.to_thread(dying.wait, 20)
    async with scene.producer("heir"):
        await scene.trainer.receive(*names)
    attempts = {delivery.group.producer: delivery.group.attempt for delivery in scene.trainer.groups.values()}
    assert attempts["heir"] >= 1
    assert max(delivery.group.attempt for delivery in scene.trainer.groups.values()) == 2


async def test_sigterm_drains_a_process(setting: Setting, processes: list[subprocess.Popen[str]]) -> None:
    scene = await setting(step_s=0.01)
    await scene.trainer.publish(0)
    process = scene.process("p1")
    processes.append(process)
    await scene.trainer.admit("task-1")
    await scene.trainer.receive("task-1")

    async def told() -> bool:
        return (await scene.peer("p1"))["version"] == str(scene.trainer.version(0))

    await wait_until(told, "its heartbeat says its version")
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 30) == 0
    assert await scene.peer("p1") == {}


async def test_a_broker_that_was_away_gets_its_groups(
    setting: Setting, redis_process: Callable[..., RedisProcess]
) -> None:
    server = redis_process("--appendfsync", "always")
    scene = await setting(url=server.url, step_s=0.02, length_mean=32.0, length_sigma=0.0)
    await scene.trainer.publish(0)
    async with scene.producer() as producer:
        await scene.trainer.admit("task-1", "task-2")
        await wait_until(lambda: len(producer.jobs.held) == 2, "both tasks are held")
        server.kill()
        playing = producer.jobs.stage.player.engine.stats
        await wait_until(lambda: playing().busy_slots == 0, "both are decoded without a broker")
        server.start()
        await scene.trainer.receive("task-1", "task-2")


async def test_a_task_that_was_taken_over_is_dropped(setting: Setting) -> None:
    scene = await setting(step_s=0.5, length_mean=1000.0)
    await scene.trainer.publish(0)
    async with scene.producer() as producer:
        await scene.trainer.admit("task-1")
        await wait_until(lambda: len(producer.jobs.held) == 1, "the task is held")
        first = next(iter(producer.jobs.held.values()))
        await wait_until(lambda: first.in_play.sampled(producer.jobs.stage.player.engine) > 0, "it is played")

        async def stolen() -> bool:
            # Its next call makes it live again, so that the thief may be too late.
            await scene.trainer.port.retire("p1")
            return bool(await scene.trainer.port.take("thief", 1, 10))

        await wait_until(stolen, "another took it over")
        await wait_until(lambda: first.job is not None and first.job.cancelled(), "its job was cancelled")
        assert producer.jobs.held == {}
        assert await counted(producer, "tokens_thrown_away_total", reason="lost") > 0
        await scene.trainer.port.order(Order("", "stop"))
        await wait_until(producer.service.stopping.is_set, "the order has come")


async def test_a_task_that_comes_again_is_not_played_again(setting: Setting) -> None:
    scene = await setting(step_s=0.1, length_mean=1000.0, length_sigma=0.0)
    await scene.trainer.publish(0)
    async with scene.producer() as producer:
        await scene.trainer.admit("task-1")
        await wait_until(lambda: len(producer.jobs.held) == 1, "the task is held")
        first = next(iter(producer.jobs.held.values()))
        # As if somebody had taken it over and given it back: a new entry, one attempt more.
        await scene.trainer.port.give_back("p1", list(producer.jobs.held))
        await wait_until(lambda: first.delivery.attempt == 2, "it came again")
        assert list(producer.jobs.held.values()) == [first]
        await scene.trainer.receive("task-1")
        assert producer.jobs.stage.player.engine.stats().decoded_tokens == 4 * 32
    assert scene.trainer.groups["task-1"].group.attempt == 2


async def test_a_second_entry_of_a_task_does_not_hide_the_first(setting: Setting) -> None:
    scene = await setting(step_s=0.1, length_mean=1000.0, length_sigma=0.0)
    await scene.trainer.publish(0)
    async with scene.producer() as producer, aioredis.Redis.from_url(scene.url) as client:
        await scene.trainer.admit("task-1")
        await wait_until(lambda: len(producer.jobs.held) == 1, "the task is held")
        stream = Keys(scene.record.run_id).of("tasks")
        ((_, fields),) = await client.xrange(stream)
        await client.xadd(stream, fields)
        await wait_until(lambda: len(producer.jobs.entry_ids) == 2, "the second entry is held, too")
        await scene.trainer.receive("task-1")
        assert producer.jobs.stage.player.engine.stats().decoded_tokens == 4 * 32

        async def empty() -> bool:
            return bool(await client.xlen(stream) == 0)

        await wait_until(empty, "neither entry is left")


async def test_a_broken_engine_ends_the_service_with_its_reason(setting: Setting) -> None:
    scene = await setting()
    service = Service("p1")
    producer = await start(service, Invocation(scene.url, scene.record.run_id, "p1"))
    running = asyncio.create_task(service.run())
    await producer.jobs.stage.player.engine.close()
    await scene.trainer.publish(0)
    await scene.trainer.admit("task-1")
    with pytest.raises(Exception, match="the scripted engine is not running"):
        await asyncio.wait_for(running, 30)
    assert (await scene.trainer.port.depths()).tasks_waiting == 1
    assert await scene.peer("p1") == {}


@pytest.mark.parametrize(
    ("change", "exit_code", "sentence"),
    [
        ({"HEADRACE_RUN": "no-such-run"}, 3, "no-such-run"),
        ({"HEADRACE_METRICS_PORT": "http"}, 2, "metrics port 'http' is not a number"),
        ({"HEADRACE_NAME": "a/b"}, 2, "producer name 'a/b' must be 1 to 100 letters"),
    ],
)
async def test_what_a_producer_is_told_wrongly_is_one_sentence(
    setting: Setting,
    processes: list[subprocess.Popen[str]],
    change: dict[str, str],
    exit_code: int,
    sentence: str,
) -> None:
    scene = await setting()
    process = scene.process("p1", **change)
    processes.append(process)
    _, said = await asyncio.to_thread(process.communicate, timeout=30)
    assert process.returncode == exit_code
    assert sentence in said.strip().splitlines()[-1]
    assert "secret" not in said


async def test_a_model_that_is_not_the_runs_is_refused(setting: Setting, tmp_path: Path) -> None:
    scene = await setting()
    tree = {**scene.record.config}
    tree["producer"] = {**tree["producer"], "engine": "torch"}
    tree["model"] = {**tree["model"], "path": str(tmp_path / "nowhere")}
    runs = connect_runs(scene.url, BROKER)
    await runs.create(replace(scene.record, run_id=f"{scene.record.run_id}-b", config=tree))
    try:
        with pytest.raises(ModelError, match="does not exist"):
            await start(Service("p1"), Invocation(scene.url, f"{scene.record.run_id}-b", "p1"))
    finally:
        await runs.delete(f"{scene.record.run_id}-b")
        await runs.close()
