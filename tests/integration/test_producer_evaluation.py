"""A producer that plays evaluations on exactly their version, while versions go on and others train."""

from __future__ import annotations

import json
from pathlib import Path

from broker.messages import Group
from producers.engines.scripted import ScriptedEngine
from producers.loops import Producer
from tests.producers import Scene, Setting
from tests.support import wait_until

SLOW = {"step_s": 0.5, "length_mean": 1000.0, "length_sigma": 0.0}


def hurry(producer: Producer) -> None:
    engine = producer.jobs.stage.player.engine
    assert isinstance(engine, ScriptedEngine)
    engine._step_s = 0.001


async def decoding(producer: Producer) -> None:
    stats = producer.jobs.stage.player.engine.stats
    await wait_until(lambda: stats().decoded_tokens > 0, "tokens are decoded")


async def on(scene: Scene, producer: Producer, step: int) -> None:
    await wait_until(lambda: producer.version == scene.trainer.version(step), f"version {step} is in the engine")


async def exam(scene: Scene, *names: str, step: int) -> None:
    """Held-out tasks of exactly this version, which is kept for them."""
    await scene.trainer.port.pin(scene.trainer.version(step))
    await scene.trainer.admit(*names, step=step, kind="eval", group_size=3)


def steps_of(group: Group) -> set[int]:
    assert (group.error, group.failures) == ("", ())
    spans = [span for member in group.trajectories for span in member.spans]
    assert {span.kv for span in spans} == {"fresh"}
    return {span.version.step for span in spans}


async def test_it_goes_back_to_a_version_that_is_evaluated_and_forth_again(setting: Setting, tmp_path: Path) -> None:
    scene = await setting(folder=str(tmp_path))
    await scene.trainer.publish(0)
    await scene.trainer.port.pin(scene.trainer.version(0))
    for step in range(1, 7):
        await scene.trainer.publish(step)
    await scene.trainer.publisher.sealed()
    async with scene.producer() as producer:
        await on(scene, producer, 6)
        await scene.trainer.admit("train-0", step=5)
        await exam(scene, *(f"exam-{number}" for number in range(9)), step=0)
        await scene.trainer.admit("train-1", "train-2", step=6)
        names = [f"exam-{number}" for number in range(9)]
        await scene.trainer.receive(*names, "train-0", "train-1", "train-2")
        await on(scene, producer, 6)
    groups = {name: steps_of(delivery.group) for name, delivery in scene.trainer.groups.items()}
    assert {name: groups[name] for name in names} == {name: {0} for name in names}
    assert [groups[f"train-{number}"] for number in range(3)] == [{6}] * 3
    lines = [json.loads(line) for line in (tmp_path / "p1.jsonl").read_text().splitlines()]
    went = [(line["event"], line["version"]) for line in lines if line["event"] in ("swap", "visit")]
    assert went[:2] == [("swap", "1.6"), ("visit", "1.0")]
    assert went[-1] == ("visit", "1.6"), "it was there before"


async def test_it_plays_training_to_its_end_before_it_goes_back(setting: Setting) -> None:
    scene = await setting(**SLOW)
    await scene.trainer.publish(0)
    await scene.trainer.port.pin(scene.trainer.version(0))
    await scene.trainer.publish(1)
    async with scene.producer() as producer:
        await on(scene, producer, 1)
        await scene.trainer.admit("train-0", step=1)
        await decoding(producer)
        await exam(scene, "exam-1", step=0)
        await wait_until(lambda: producer.jobs.pressing, "the evaluation waits for its version")
        assert producer.jobs.room() == 0
        await scene.trainer.publish(2)
        await on(scene, producer, 2)
        hurry(producer)
        await scene.trainer.receive("train-0", "exam-1")
    groups = {name: delivery.group for name, delivery in scene.trainer.groups.items()}
    assert steps_of(groups["exam-1"]) == {0}
    last = {member.spans[-1].version.step for member in groups["train-0"].trajectories}
    assert last == {2}, "training went on, and on newer versions"


async def test_training_goes_on_elsewhere_while_an_evaluation_keeps_a_producer(setting: Setting) -> None:
    """What it cannot begin it gives back, and the other producer has it."""
    scene = await setting(**SLOW)
    await scene.trainer.publish(0)
    async with scene.producer("p1") as one:
        await on(scene, one, 0)
        await exam(scene, "exam-1", step=0)
        await decoding(one)
        await scene.trainer.admit("train-0", "train-1", step=1)
        await scene.trainer.publish(1)
        async with scene.producer("p2") as other:
            await on(scene, other, 1)
            hurry(other)
            await scene.trainer.receive("train-0", "train-1")
            assert one.version == scene.trainer.version(0)
            assert len(one.jobs.held) == 1
        hurry(one)
        await scene.trainer.receive("exam-1")
        await on(scene, one, 1)
    groups = {name: delivery.group for name, delivery in scene.trainer.groups.items()}
    assert (groups["train-0"].producer, groups["train-1"].producer) == ("p2", "p2")
    assert steps_of(groups["exam-1"]) == {0}


async def test_a_producer_that_is_killed_in_an_evaluation_is_taken_over(setting: Setting) -> None:
    scene = await setting(**SLOW)
    await scene.trainer.publish(0)
    first = scene.process("first", OMP_NUM_THREADS="1")
    try:

        async def has_it() -> bool:
            return (await scene.peer("first")).get("version") == "1.0"

        await wait_until(has_it, "the first producer has a version", seconds=60)
        await exam(scene, "exam-1", step=0)

        async def held() -> bool:
            return await scene.held() == 1

        await wait_until(held, "the first producer plays it")
    finally:
        first.kill()
        await wait_until(lambda: first.poll() is not None, "it is dead")
        assert first.stderr is not None
        first.stderr.close()
    await scene.trainer.publish(1)
    async with scene.producer("second") as second:
        hurry(second)
        await scene.trainer.receive("exam-1")
    group = scene.trainer.groups["exam-1"].group
    assert (group.producer, group.attempt, steps_of(group)) == ("second", 2, {0})


async def test_a_version_that_nobody_has_any_more_fails_at_once(setting: Setting) -> None:
    scene = await setting()
    for step in range(8):
        await scene.trainer.publish(step)
    await scene.trainer.publisher.sealed()
    async with scene.producer() as producer:
        await on(scene, producer, 7)
        await scene.trainer.admit("exam-1", step=0, kind="eval", group_size=3)
        await scene.trainer.admit("train-1", step=7)
        await scene.trainer.receive("exam-1", "train-1")
    group = scene.trainer.groups["exam-1"].group
    assert (group.outcome, group.error) == ("failed", "version 1.0 cannot be had here any more")
    assert steps_of(scene.trainer.groups["train-1"].group) == {7}


async def test_evaluations_are_sampled_as_their_section_says(setting: Setting) -> None:
    scene = await setting(change={"evaluation": {"max_new_tokens": 5}}, length_mean=1000.0, length_sigma=0.0)
    await scene.trainer.publish(0)
    async with scene.producer():
        await exam(scene, "exam-1", step=0)
        await scene.trainer.admit("train-1")
        await scene.trainer.receive("exam-1", "train-1")
    sampled = {
        name: {int(member.loss_mask_T.sum()) for member in delivery.group.trajectories}
        for name, delivery in scene.trainer.groups.items()
    }
    assert sampled == {"exam-1": {5}, "train-1": {32}}
