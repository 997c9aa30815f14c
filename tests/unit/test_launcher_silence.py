"""When a part that lives and says nothing is ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.processes import Child, Command
from deploy.restarts import LIMITS
from deploy.silence import LEASES, Silence
from deploy.supervisor import Part
from headrace.config import Config


@pytest.fixture
def part(tmp_path: Path) -> Iterator[Callable[[str], Part]]:
    started: list[Child] = []

    def make(role: str) -> Part:
        command = Command((sys.executable, "-c", "import time; time.sleep(60)"), {}, tmp_path / f"{role}.log")
        started.append(Child.spawn(command))
        return Part(role, role, lambda _: started[-1], LIMITS[role], child=started[-1], joined=True)

    yield make
    for child in started:
        child.kill()
        child.close()


def test_a_part_that_is_not_heard_of_for_many_leases_is_ended(part: Callable[[str], Part]) -> None:
    producer = part("producer")
    assert producer.child is not None
    silence = Silence(Config.model_validate({"producer": {"lease_s": 2.0}}))
    for _ in range(3):
        assert silence.too_long([producer], set(), 2.0 * LEASES - 1.0) == []
        assert silence.too_long([producer], {producer.child.pid}, 2.0 * LEASES) == [], "it was heard of meanwhile"
    assert silence.too_long([producer], set(), 1.0) == []
    assert silence.too_long([producer], set(), 2.0 * LEASES) == [(producer, 2.0 * LEASES + 1.0)]
    assert silence.too_long([producer], set(), 1.0) == [], "its successor begins anew"


def test_parts_with_other_bounds_are_left_alone(part: Callable[[str], Part]) -> None:
    redis, starting, leaving, ended = part("redis"), part("producer"), part("trainer"), part("weights")
    starting.joined = False
    leaving.told_to_leave.set()
    assert ended.child is not None
    ended.child.kill()
    assert Silence(Config()).too_long([redis, starting, leaving, ended], set(), 1e6) == []
