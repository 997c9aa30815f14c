"""Whole producers with environments whose rewards hang, raise, fork or eat memory: the others' groups go on."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from broker.messages import Group
from tests.living import living
from tests.producers import Scene, Setting, counted

OWN = """
import os, time

def sleeps(rollout):
    time.sleep(6000)

def slow(rollout):
    time.sleep(0.05)
    return 1.0

def raises(rollout):
    raise ValueError("no idea")

def forks(rollout):
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            time.sleep(6000)
    time.sleep(6000)

def eats(rollout):
    held = []
    while True:
        held.append(bytearray(b"x" * (16 << 20)))

def ranks(rollouts):
    order = sorted(range(len(rollouts)), key=lambda member: rollouts[member].completion)
    return [order.index(member) / len(rollouts) for member in range(len(rollouts))]

def some(rollout):
    if len(rollout.completion) % 2:
        raise ValueError("odd")
    return 1.0
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """Stands in the environment of every process that is started in this test, and in that of their children."""
    token = uuid.uuid4().hex
    monkeypatch.setenv("HEADRACE_TEST_MARK", token)
    return token


def marked(mark: str) -> list[int]:
    return [process.pid for process in living(lambda process: process.environ().get("HEADRACE_TEST_MARK") == mark)]


def environments(own: str, *rewards: str) -> list[dict[str, Any]]:
    """An environment for each reward, called like it, and "good" with the reward of its own."""
    named = [{"name": "arithmetic", "label": reward, "reward": f"{own}:{reward}"} for reward in rewards]
    return [{"name": "arithmetic", "label": "good"}, *named]


async def admit(scene: Scene, environment: str, count: int, first: int = 0) -> list[str]:
    names = [f"{environment}-{number}" for number in range(first, first + count)]
    await scene.trainer.admit(*names, environment=environment)
    return names


def groups_of(scene: Scene, environment: str) -> list[Group]:
    groups = [delivery.group for delivery in scene.trainer.groups.values()]
    return [group for group in groups if group.environment == environment]


async def test_each_fails_with_its_reason_and_no_process_is_left(setting: Setting, own: str, mark: str) -> None:
    bad = ("sleeps", "raises", "forks", "eats")
    producer = {"reward_memory_mb": 150, "reward_deadline_s": 2.5}
    change = {"environments": environments(own, *bad), "producer": producer}
    scene = await setting(change=change)
    await scene.trainer.publish(0)
    async with scene.producer():
        for environment in (*bad, "good"):
            await scene.trainer.admit(environment, environment=environment, group_size=2)
        await scene.trainer.receive(*bad, "good")
    assert marked(mark) == []
    reasons = {
        "sleeps": "2 of 2 rollouts failed: reward took longer than 2.5 s",
        "raises": "2 of 2 rollouts failed: reward raised ValueError: no idea",
        "forks": "2 of 2 rollouts failed: reward took longer than 2.5 s",
        "eats": "2 of 2 rollouts failed: reward held ",
    }
    for environment, reason in reasons.items():
        assert all(group.error.startswith(reason) for group in groups_of(scene, environment)), environment
    assert [len(group.trajectories) for group in groups_of(scene, "good")] == [2]


async def test_a_scorer_that_never_answers_holds_up_no_other_environment(setting: Setting, own: str) -> None:
    """Its tasks are more than a producer holds decoded groups, and none of them is answered meanwhile."""
    change = {"environments": environments(own, "sleeps"), "producer": {"reward_deadline_s": 6000.0, "drain_s": 0.5}}
    scene = await setting(change=change)
    await scene.trainer.publish(0)
    async with scene.producer() as producer:
        most = producer.jobs.capacity.most_decoded
        names: list[str] = []
        for number in range(2 * most):
            await admit(scene, "sleeps", 1, number)
            names += await admit(scene, "good", 4, 4 * number)
        await scene.trainer.receive(*names)
        assert groups_of(scene, "sleeps") == []
        held = list(producer.jobs.held.values())
        producer.jobs.tell_backlog()
        assert await counted(producer, "groups_unscored", environment="sleeps") >= producer.jobs.capacity.most_unscored
        assert await counted(producer, "groups_held_back", environment="sleeps") == sum(one.held_back for one in held)
        assert await counted(producer, "groups_held_back", environment="good") == 0
        assert len(held) == 2 * most
        assert sum(one.held_back for one in held) >= most
        assert all(group.outcome == "played" for group in groups_of(scene, "good"))
        # Nothing but what is behind is here, and still others' tasks are taken and played.
        await scene.trainer.receive(*await admit(scene, "good", 4, 10_000))
        assert groups_of(scene, "sleeps") == []


async def test_what_is_held_back_fails_once_it_has_waited_for_the_deadline(setting: Setting, own: str) -> None:
    """While others' tasks come. What began before fails by its own scores."""
    producer = {"reward_deadline_s": 0.5, "slots": 2}
    change = {"environments": environments(own, "sleeps"), "producer": producer, "trainer": {"group_size": 2}}
    scene = await setting(change=change)
    await scene.trainer.publish(0)
    async with scene.producer():
        behind = [f"sleeps-{number}" for number in range(6)]
        await scene.trainer.admit(*behind, environment="sleeps", group_size=2)
        number = 0
        while not set(behind) <= scene.trainer.groups.keys():
            await scene.trainer.admit(f"good-{number}", environment="good", group_size=2)
            await scene.trainer.receive(f"good-{number}")
            number += 1
    assert {group.error for group in groups_of(scene, "sleeps")} == {
        "2 of 2 rollouts failed: reward took longer than 0.5 s",
        "environment 'sleeps' is 2 groups behind with its scores",
    }
    assert all(group.outcome == "played" for group in groups_of(scene, "good"))


async def test_an_environment_alone_is_only_slowed_down(setting: Setting, own: str) -> None:
    """Where no other one's tasks go on, none of its own fails for being too many."""
    scene = await setting(change={"environments": environments(own, "slow")})
    await scene.trainer.publish(0)
    async with scene.producer() as producer:
        await scene.trainer.receive(*await admit(scene, "slow", 12))
        assert producer.jobs.capacity.environments == 2
    assert all(group.outcome == "played" for group in groups_of(scene, "slow"))


async def test_rewards_relative_to_the_group(setting: Setting, own: str) -> None:
    rewards = [{"name": f"{own}:ranks", "group": True}, {"name": f"{own}:some", "weight": 10}]
    listed = [
        {"name": "arithmetic", "label": "ranked", "reward": rewards[0]},
        {"name": "arithmetic", "label": "both", "reward": rewards},
        {"name": "arithmetic", "label": "none", "reward": [rewards[0], f"{own}:raises"]},
    ]
    scene = await setting(change={"environments": listed})
    await scene.trainer.publish(0)
    async with scene.producer():
        names = [name for label in ("ranked", "both", "none") for name in await admit(scene, label, 3)]
        await scene.trainer.admit("ranked-9", environment="ranked", kind="eval")
        await scene.trainer.receive(*names, "ranked-9")
    for group in groups_of(scene, "ranked"):
        rewards_N = sorted(trajectory.reward for trajectory in group.trajectories)
        assert rewards_N == ([0.0, 0.25, 0.5, 0.75] if group.kind == "train" else [0.0] * 4)
    both = groups_of(scene, "both")
    # What failed by itself is left out of the ranking, and the others are ranked among themselves.
    assert sum(len(group.failures) for group in both) > 0
    for group in both:
        good = len(group.trajectories)
        assert sorted(trajectory.reward for trajectory in group.trajectories) == [10 + n / good for n in range(good)]
        assert all(failure.endswith("raised ValueError: odd") for failure in group.failures)
    raised = f"4 of 4 rollouts failed: reward '{own}:raises' raised ValueError: no idea"
    assert [group.error for group in groups_of(scene, "none")] == [raised] * 3
