"""A producer whose rollouts fall behind the versions: it stops what nobody can use, and nothing else."""

from __future__ import annotations

from broker.messages import Group
from broker.validate import Limits, check_group
from producers.engines.scripted import ScriptedEngine
from producers.loops import Producer
from tests.producers import Scene, Setting, counted
from tests.support import wait_until

MAX_LAG = 2


async def slow(setting: Setting, stale: str) -> Scene:
    """Rollouts of 32 tokens that take 16 s, until the test is in a `hurry`."""
    change = {"staleness": {"max_lag": MAX_LAG, "stale": stale}}
    return await setting(change=change, step_s=0.5, length_mean=1000.0, length_sigma=0.0)


async def sampling(producer: Producer, tokens: int) -> None:
    stats = producer.jobs.stage.player.engine.stats
    await wait_until(lambda: stats().decoded_tokens >= tokens, f"{tokens} tokens are decoded")


def hurry(producer: Producer) -> None:
    engine = producer.jobs.stage.player.engine
    assert isinstance(engine, ScriptedEngine)
    engine._step_s = 0.001


async def go_on(scene: Scene, producer: Producer, *steps: int) -> None:
    for step in steps:
        await scene.trainer.publish(step)
        await wait_until(lambda step=step: producer.version == scene.trainer.version(step), f"version {step} is here")


async def test_stragglers_are_stopped_and_told_of(setting: Setting) -> None:
    scene = await slow(setting, "drop")
    await scene.trainer.publish(0)
    async with scene.producer() as producer:
        # Two groups fill the slots, the third waits for one.
        await scene.trainer.admit("old-1", "old-2", "young-3")
        await sampling(producer, 16)
        await go_on(scene, producer, 1, MAX_LAG)
        assert producer.gauges.published == 0
        await go_on(scene, producer, MAX_LAG + 1)
        await scene.trainer.receive("old-1", "old-2")
        for name in ("old-1", "old-2"):
            stopped(scene.trainer.groups[name].group)
        await wait_until(lambda: len(producer.jobs.held) == 1, "the other is played")
        thrown_away = await counted(producer, "tokens_thrown_away_total", reason="stale")
        assert thrown_away == sum(sum(scene.trainer.groups[name].group.stopped_N) for name in ("old-1", "old-2"))
        assert await counted(producer, "groups_stopped_total") == 2
        assert await counted(producer, "rollouts_stopped_total") == 8
        hurry(producer)
        await scene.trainer.receive("young-3")
    group = scene.trainer.groups["young-3"].group
    assert (group.outcome, group.failures) == ("played", ())
    assert {span.version for member in group.trajectories for span in member.spans} == {scene.trainer.version(3)}


def stopped(group: Group) -> None:
    assert (group.outcome, group.trajectories, group.failures) == ("stale", (), ())
    assert group.error == "stopped while it was played: more than staleness.max_lag = 2 steps behind"
    assert len(group.stopped_N) == 4
    assert all(0 < sampled < 32 for sampled in group.stopped_N)
    assert check_group(group, Limits(256, {"train": 4})) is None


async def test_an_evaluation_is_played_to_its_end_whatever_its_age(setting: Setting) -> None:
    scene = await slow(setting, "drop")
    await scene.trainer.publish(0)
    async with scene.producer() as producer:
        await scene.trainer.admit("exam-1", kind="eval", group_size=3)
        await sampling(producer, 3)
        for step in (1, 2, 3, 4):
            await scene.trainer.publish(step)
        await wait_until(lambda: producer.jobs.head == scene.trainer.version(4), "it knows of the newest version")
        assert producer.version == scene.trainer.version(0)
        hurry(producer)
        await scene.trainer.receive("exam-1")
        await wait_until(lambda: producer.version == scene.trainer.version(4), "it goes on with the newest version")
    group = scene.trainer.groups["exam-1"].group
    assert (group.outcome, len(group.trajectories)) == ("played", 3)
    spans = [span for trajectory in group.trajectories for span in trajectory.spans]
    assert {(span.version, span.kv) for span in spans} == {(scene.trainer.version(0), "fresh")}


async def test_where_old_tokens_are_masked_nothing_is_stopped(setting: Setting) -> None:
    scene = await slow(setting, "mask")
    await scene.trainer.publish(0)
    async with scene.producer() as producer:
        await scene.trainer.admit("old-1")
        await sampling(producer, 4)
        await go_on(scene, producer, 1, 2, 3, 4)
        hurry(producer)
        await scene.trainer.receive("old-1")
    group = scene.trainer.groups["old-1"].group
    assert (group.outcome, group.stopped_N) == ("played", ())
    assert {trajectory.spans[0].version for trajectory in group.trajectories} == {scene.trainer.version(0)}
    assert {trajectory.spans[-1].version for trajectory in group.trajectories} == {scene.trainer.version(4)}
