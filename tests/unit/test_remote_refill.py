"""How many requests an SGLang server is given, and which server a request goes to."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.engines.remote.refill import FULL, Load, ceiling, choose, group_key, next_limit

COUNT = st.integers(0, 200)
LOADS = st.builds(
    Load,
    running=COUNT,
    queued=COUNT,
    used_tokens=st.integers(0, 10_000),
    capacity_tokens=st.integers(0, 10_000),
    max_running=COUNT,
    retractions=st.integers(0, 5),
)
IDLE = Load(running=0, queued=0, used_tokens=0, capacity_tokens=10_000, max_running=64)


@given(limit=st.integers(1, 200), most=st.integers(1, 200), before=st.none() | LOADS, now=LOADS)
def test_a_limit_is_never_none_and_never_above_the_most(limit: int, most: int, before: Load | None, now: Load) -> None:
    limit = min(limit, most)
    after = next_limit(limit, most, before, now)
    assert 1 <= after <= most
    if before is not None and now.retractions > before.retractions:
        assert after < limit or limit == 1
    if now.usage > FULL:
        assert after <= limit
    calm = now.usage <= FULL and now.queued == 0 and (before is None or now.retractions <= before.retractions)
    if calm and now.usage == 0 and now.running < now.max_running:
        assert after > limit or after >= min(most, now.max_running)


def test_a_server_that_does_not_tell_its_capacity_is_given_more() -> None:
    assert next_limit(1, 2, None, Load(running=1, queued=0, used_tokens=1, capacity_tokens=0, max_running=2)) == 2


def test_what_has_just_come_is_no_queue_that_stays() -> None:
    flood = replace(IDLE, running=1, queued=63)
    assert next_limit(64, 64, None, flood) == 64
    assert next_limit(64, 64, flood, replace(flood, running=40, queued=24)) == 64
    assert next_limit(64, 64, replace(flood, running=40, queued=24), replace(flood, running=40, queued=24)) == 41


def test_one_in_the_servers_queue_refills_a_slot_at_once() -> None:
    assert ceiling(64, 48) == 51
    assert ceiling(32, 48) == 32
    assert ceiling(4, 0) == 4
    assert ceiling(64, 1) == 2


@dataclass
class Simulated:
    """A server that decodes a token of each running request per step, and retracts one when its cache is full."""

    capacity: int
    max_running: int
    random: random.Random
    queue: list[list[int]] = field(default_factory=list)
    """Requests as [tokens now, tokens at its end]."""
    running: list[list[int]] = field(default_factory=list)
    retractions: int = 0
    done: int = 0

    def give(self) -> None:
        prompt = self.random.randint(10, 40)
        self.queue.append([prompt, prompt + self.random.randint(5, 300)])

    @property
    def open(self) -> int:
        return len(self.queue) + len(self.running)

    @property
    def used(self) -> int:
        return sum(now for now, _ in self.running)

    def step(self) -> None:
        while self.queue and len(self.running) < self.max_running and self.used + self.queue[0][0] < self.capacity:
            self.running.append(self.queue.pop(0))
        for request in self.running:
            request[0] += 1
        finished = [request for request in self.running if request[0] >= request[1]]
        self.done += len(finished)
        self.running = [request for request in self.running if request[0] < request[1]]
        while self.used > self.capacity:
            self.queue.insert(0, self.running.pop())
            self.retractions += 1

    def load(self) -> Load:
        return Load(len(self.running), len(self.queue), self.used, self.capacity, self.max_running, self.retractions)


def played(capacity: int, max_running: int, seed: int, *, adapts: bool, steps: int = 4000) -> tuple[float, int]:
    """Mean requests that ran, and retractions, in the second half."""
    server = Simulated(capacity, max_running, random.Random(seed))
    most = limit = ceiling(128, max_running)
    before, ran, retracted = None, 0, 0
    for step in range(steps):
        while server.open < limit:
            server.give()
        server.step()
        if step == steps // 2:
            retracted = server.retractions
        if step >= steps // 2:
            ran += len(server.running)
        if adapts and step % 10 == 9:
            now = server.load()
            limit, before = next_limit(limit, most, before, now), now
    return ran / (steps // 2), server.retractions - retracted


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity", [2_000, 6_000, 12_000])
def test_slots_are_full_and_little_is_taken_out_again(capacity: int, seed: int) -> None:
    fixed_ran, fixed_retracted = played(capacity, 64, seed, adapts=False)
    ran, retracted = played(capacity, 64, seed, adapts=True)
    assert fixed_retracted == 0 or retracted < fixed_retracted / 5
    assert ran > 0.78 * fixed_ran


def test_with_cache_enough_all_slots_are_full() -> None:
    ran, retracted = played(100_000, 64, 0, adapts=True)
    assert retracted == 0
    assert ran > 63


@given(
    key=st.text(max_size=8),
    room=st.dictionaries(
        st.text("abc", min_size=1, max_size=3), st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=5
    ),
)
def test_a_server_with_room_is_chosen_where_there_is_one(key: str, room: dict[str, tuple[int, int]]) -> None:
    chosen = choose(key, room)
    if chosen is None:
        assert all(held >= limit for held, limit in room.values())
    else:
        held, limit = room[chosen]
        assert held < limit


def test_a_group_meets_at_one_server_and_spills_to_the_emptiest() -> None:
    room = dict.fromkeys("abcdef", (0, 4))
    homes = {key: choose(key, room) for key in map(str, range(60))}
    assert len(set(homes.values())) == 6
    home = homes["7"]
    assert home is not None
    full = {**room, home: (4, 4), "f" if home != "f" else "a": (1, 9)}
    assert choose("7", full) == ("f" if home != "f" else "a")
    # One that goes moves only its own groups.
    gone = {name: one for name, one in room.items() if name != home}
    assert all(choose(key, gone) == place for key, place in homes.items() if place != home)


def test_members_of_a_task_have_its_name_in_common() -> None:
    assert group_key("task-7/0/0#12", b"p") == group_key("task-7/3/1#15", b"q") == "task-7"
    assert group_key("train/9/2/0#1", b"") == "train/9"
    assert group_key("alone", b"p") == group_key("other", b"p") != group_key("other", b"q")
