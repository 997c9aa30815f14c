"""A whole run as admission sees it: whatever comes late, stale or large, its bounds hold and it reaches its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import example, given
from hypothesis import strategies as st

from consumers.admission import Window
from consumers.curriculum import Prompt
from consumers.retention import EARLY, MOST_STEPS, Retained, Retention
from headrace.version import PolicyVersion

FIRST = PolicyVersion(1, 0)


@dataclass
class Run:
    """Tasks are played in any order, at any time, on any version that they may start on."""

    window: Window
    retention: Retention
    requeue: int
    chance: Random
    smallest: int
    """Bytes of a group are from here to twice as many."""
    formed: int = 0
    cursor: int = 0
    coming: list[tuple[Prompt, int]] = field(default_factory=list)
    """Prompt, and the step of the version that its oldest token will have."""
    waiting: list[tuple[Prompt, int, int]] = field(default_factory=list)
    """The same, and bytes."""
    unsettled: list[int] = field(default_factory=list)
    """Bytes of each step."""
    largest: int = 0
    asked: list[Prompt] = field(default_factory=list)
    disk_full: bool = False

    @property
    def retained(self) -> Retained:
        waiting = sum(nbytes for *_, nbytes in self.waiting)
        return Retained(len(self.unsettled), sum(self.unsettled), len(self.waiting), waiting, self.largest)

    def ask(self, prompt: Prompt) -> None:
        self.asked.append(prompt)
        self.coming.append((prompt, self.window.min_version(self.formed, FIRST).step))

    def admit(self) -> None:
        free = self.window.free(self.formed, len(self.coming) + len(self.waiting))
        for _ in range(min(free, self.retention.room(self.retained, len(self.coming)))):
            self.ask(Prompt(self.cursor))
            self.cursor += 1

    def arrive(self) -> None:
        prompt, step = self.coming.pop(self.chance.randrange(len(self.coming)))
        nbytes = self.chance.randint(self.smallest, 2 * self.smallest)
        self.largest = max(self.largest, nbytes)
        self.waiting.append((prompt, step, nbytes))

    def drop_stale(self) -> None:
        stale = [prompt for prompt, step, _ in self.waiting if self.formed - step > self.window.max_lag]
        self.waiting = [item for item in self.waiting if item[0] not in stale]
        for prompt in stale:
            if prompt.again < self.requeue:
                self.ask(prompt.next)

    def save(self) -> None:
        if not self.disk_full:
            self.unsettled.clear()

    def step(self) -> bool:
        """One more batch, when its groups are there and there is room for a step."""
        if self.retention.early(self.retained):
            self.save()
        self.drop_stale()
        if len(self.waiting) < self.window.groups_per_step or self.retention.full(self.retained):
            return False
        batch, self.waiting = (
            self.waiting[: self.window.groups_per_step],
            self.waiting[self.window.groups_per_step :],
        )
        assert all(self.formed - step <= self.window.max_lag for _, step, _ in batch)
        self.unsettled.append(sum(nbytes for *_, nbytes in batch))
        self.formed += 1
        return True

    def check(self) -> None:
        assert len(self.coming) + len(self.waiting) <= self.window.slots
        largest_batch = 2 * self.smallest * self.window.groups_per_step
        assert self.retained.nbytes <= max(self.retention.bound, largest_batch)
        assert len(self.unsettled) <= MOST_STEPS


@given(
    st.integers(1, 5),
    st.integers(0, 4),
    st.integers(1, 12),
    st.integers(0, 2),
    st.integers(1, 60),
    st.integers(0, 2**32),
)
def test_every_run_keeps_its_bounds_and_ends(
    groups: int, max_lag: int, steps: int, requeue: int, bound: int, seed: int
) -> None:
    """The bound on bytes is from less than one group to many batches of them; the disk is full now and then."""
    smallest = 10
    retention = Retention(bound * smallest, groups, 2 * smallest)
    run = Run(Window(groups, max_lag, steps), retention, requeue, Random(seed), smallest)
    idle = 0
    while run.formed < steps:
        before = run.formed, len(run.asked), len(run.coming)
        run.disk_full = idle < 20 and run.chance.random() < 0.3
        run.admit()
        run.check()
        if run.coming and run.chance.random() < 0.8:
            run.arrive()
        while run.step():
            run.check()
        idle = idle + 1 if (run.formed, len(run.asked), len(run.coming)) == before else 0
        assert idle < 200, "nothing moves any more, though there is room on the disk"
    assert len(set(run.asked)) == len(run.asked), "no prompt is asked twice under one name"
    assert all(prompt.again <= requeue for prompt in run.asked)


def test_with_a_full_disk_a_run_stands_below_its_bound_and_goes_on_afterwards() -> None:
    run = Run(Window(2, 2, 100), Retention(400, 2, 20), 1, Random(1), 10, disk_full=True)
    for _ in range(500):
        run.admit()
        if run.coming:
            run.arrive()
        while run.step():
            run.check()
    made = run.formed
    assert 3 < made < 100
    assert run.retained.nbytes > EARLY * 400
    run.disk_full = False
    for _ in range(500):
        run.admit()
        if run.coming:
            run.arrive()
        run.step()
    assert run.formed == 100


def test_one_group_larger_than_the_bound_is_trained_on() -> None:
    retention = Retention(100, 1, 5000)
    nothing = Retained(0, 0, 0, 0, 0)
    assert retention.room(nothing, 0) == 1
    assert retention.room(nothing, 1) == 0
    waits = Retained(0, 0, 1, 5000, 5000)
    assert not retention.full(waits)
    trained = Retained(1, 5000, 0, 0, 5000)
    assert retention.early(trained)
    assert retention.full(trained)
    assert retention.room(trained, 0) == 0


@given(st.integers(0, MOST_STEPS), st.integers(1, 8))
def test_steps_without_a_checkpoint_stay_far_from_the_end_of_the_step_log(steps: int, groups: int) -> None:
    retention = Retention(1 << 40, groups, 100)
    small = Retained(steps, steps, 0, 0, 1)
    assert retention.early(small) == (steps >= EARLY * MOST_STEPS)
    assert retention.full(small) == (steps >= MOST_STEPS)


@given(st.integers(0, 10_000), st.integers(1, 10_000))
def test_a_group_to_come_is_taken_for_twice_the_largest_but_not_longer_than_can_be(largest: int, full: int) -> None:
    expected = Retention(1, 1, full).expected(largest)
    assert expected >= largest
    assert expected <= max(full, largest)
    assert expected in (largest, full, 2 * largest)


@given(
    st.integers(1, 8),
    st.integers(1, 2000),
    st.integers(0, 2000),
    st.lists(st.integers(10, 20), max_size=8),
    st.integers(0, 8),
)
@example(5, 150, 51, [10] * 4, 0)
def test_whoever_has_no_room_to_ask_for_the_next_batch_takes_a_checkpoint(
    groups: int, bound: int, unsettled: int, waiting: list[int], coming: int
) -> None:
    retention = Retention(bound, groups, 20)
    now = Retained(int(unsettled > 0), unsettled, len(waiting), sum(waiting), max(waiting, default=0))
    if len(waiting) + coming < groups and retention.room(now, coming) == 0:
        assert retention.early(now)
