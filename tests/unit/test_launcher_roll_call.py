"""What the launcher sees of its parts through the broker's peers."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.api import Peer
from deploy.processes import Child, Command
from deploy.restarts import LIMITS
from deploy.roll_call import RollCall
from deploy.supervisor import Part
from headrace.config import Config

Events = list[tuple[str, str, str]]


@pytest.fixture
def part(tmp_path: Path) -> Iterator[Callable[[str], Part]]:
    started: list[Child] = []

    def make(role: str) -> Part:
        command = Command((sys.executable, "-c", "import time; time.sleep(60)"), {}, tmp_path / f"{role}.log")
        started.append(Child.spawn(command))
        return Part(role, role, lambda _: started[-1], LIMITS[role], child=started[-1])

    yield make
    for child in started:
        child.kill()
        child.close()


def peer(part: Part, *, host: str = "", **state: object) -> Peer:
    assert part.child is not None
    return Peer(part.name, "trainer", host or socket.gethostname(), part.child.pid, True, state)


@pytest.fixture
def events() -> Events:
    return []


@pytest.fixture
def roll_call(events: Events) -> RollCall:
    return RollCall(Config(), lambda *event: events.append(event))


def test_who_gives_a_heartbeat_has_joined(roll_call: RollCall, events: Events, part: Callable[[str], Part]) -> None:
    trainer, producer = part("trainer"), part("producer")
    roll_call.call([trainer, producer], [peer(trainer, version="1.2", tokens_per_s=5.0)], 1.0)
    roll_call.call([trainer, producer], [peer(trainer, version="1.3", tokens_per_s=5.0)], 1.0)
    assert events == [("trainer", "joined", "")]
    assert (trainer.joined, producer.joined) == (True, False)
    views = roll_call.views([trainer, producer])
    assert [(view.name, view.state, view.version) for view in views] == [
        ("trainer", "running", "1.3"),
        ("producer", "starting", ""),
    ]


def test_a_process_of_that_number_elsewhere_is_another_one(
    roll_call: RollCall, events: Events, part: Callable[[str], Part]
) -> None:
    trainer = part("trainer")
    roll_call.call([trainer], [peer(trainer, host="elsewhere", version="1.2")], 1.0)
    assert events == []
    assert roll_call.views([trainer])[0].version == ""


def test_a_redis_that_answered_has_joined(roll_call: RollCall, events: Events, part: Callable[[str], Part]) -> None:
    redis = part("redis")
    roll_call.call([redis], [], 1.0)
    assert redis.joined
    assert events == []


def test_what_the_trainer_cannot_go_on_for_is_told_once(
    roll_call: RollCall, events: Events, part: Callable[[str], Part]
) -> None:
    trainer = part("trainer")
    full, alone = ({"kind": "x", "reason": reason, "since": 1.0} for reason in ("the disk is full", "nobody plays"))
    for troubles in ([], [full], [full], [full, alone], [alone], [], []):
        roll_call.call([trainer], [peer(trainer, troubles=troubles)], 1.0)
    assert events == [
        ("trainer", "joined", ""),
        ("trainer", "in trouble", "the disk is full"),
        ("trainer", "in trouble", "nobody plays"),
        ("trainer", "goes on", ""),
    ]


def test_a_producer_that_came_since_is_not_told_as_missing(
    roll_call: RollCall, events: Events, part: Callable[[str], Part]
) -> None:
    trainer = part("trainer")
    alone = {"kind": "producers", "reason": "all producers are gone", "since": 1.0}
    by_hand = Peer("by-hand", "producer", "elsewhere", 7, True, {})
    for others in ([by_hand], [], [by_hand]):
        roll_call.call([trainer], [peer(trainer, troubles=[alone]), *others], 1.0)
    assert events == [
        ("trainer", "joined", ""),
        ("trainer", "in trouble", "all producers are gone"),
        ("trainer", "goes on", ""),
    ]


def test_other_processes_are_nobody(roll_call: RollCall, events: Events, part: Callable[[str], Part]) -> None:
    stranger = Peer(
        "by-hand", "producer", socket.gethostname(), os.getpid(), True, {"troubles": [{"reason": "x", "since": 1}]}
    )
    roll_call.call([part("producer")], [stranger], 1.0)
    assert events == []
