"""What the trainer knows of its run, against a broker that forgets: pure decisions, on a model of the broker."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.bounds import MAX_REASONS
from broker.mirror import Found, Kept, Mirror, Opened, Repair
from tests.support import make_task

WHY = "lost for a test"
NAMES = st.integers(0, 2)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), NAMES, st.sampled_from(["done", "answer lost", "not done"])),
        st.tuples(st.just("publish"), NAMES),
        st.tuples(st.just("receive"), NAMES),
        st.tuples(st.just("settle"), NAMES, st.booleans()),
        st.tuples(st.just("replay"), NAMES),
        st.tuples(st.just("lose"), st.integers(1, 6)),
        st.tuples(st.just("lose"), st.just(10_000)),
        st.tuples(st.just("mend"), st.sampled_from(["done", "not done"])),
    ),
    max_size=40,
)


@dataclass
class Broker:
    """The sheet as Redis has it, and all that it ever was."""

    counts: Counter[str] = field(default_factory=Counter)
    open: dict[str, str] = field(default_factory=dict)
    again: dict[str, int] = field(default_factory=dict)
    replays: int = 0

    def admit(self, name: str, where: str = "t") -> bool:
        if name in self.open:
            return False
        self.open[name] = where
        self.counts["train admitted"] += 1
        return True

    def close(self, name: str, verdict: str) -> None:
        if self.open.pop(name, None):
            self.again.pop(name, None)
            self.counts[f"train v {verdict}"] += 1

    def found(self) -> Found:
        opened = {name: Opened("train", where, True, self.again.get(name, 0)) for name, where in self.open.items()}
        return Found(dict(self.counts), opened, self.replays)

    def do(self, repair: Repair) -> None:
        self.counts.update({name: number - self.counts[name] for name, number in repair.counts.items()})
        for name in repair.closed:
            del self.open[name]
        for name, _ in repair.held:
            self.open[name] = "g"
        for name, kept in repair.lost:
            self.open.pop(name, None)
            self.counts["train v lost"] += 1
            self.counts[f"train r lost: {WHY}"] += 1
            if kept.body is not None:
                self.admit(name)


class Walk:
    def __init__(self) -> None:
        self.mirror, self.broker = Mirror(), Broker()
        self.past = [copy.deepcopy(self.broker)]
        self.held: set[str] = set()
        self.number = 0
        self.suspect = False
        self.live: set[str] = set()
        """What should be outstanding; what nobody knows of any more is not."""

    def step(self, what: str, *args: Any) -> None:
        getattr(self, what)(*args)
        if what != "lose":
            self.past.append(copy.deepcopy(self.broker))

    def admit(self, name: int, outcome: str) -> None:
        self.whole()
        task = make_task(f"t{name}")
        self.mirror.ask([(task, b"body")])
        replayed = {f"t{name}"} if f"t{name}" in self.broker.again else set()
        if outcome != "not done":
            self.broker.admit(f"t{name}")
            self.live.add(f"t{name}")
        if outcome == "done":
            self.mirror.admitted([f"t{name}"], replayed)

    def publish(self, name: int) -> None:
        if self.broker.open.get(f"t{name}") == "t":
            self.broker.open[f"t{name}"] = "g"

    def receive(self, name: int) -> None:
        # A group is not given out before the replays are known.
        self.mend("done")
        if self.broker.open.get(f"t{name}") == "g":
            self.held.add(f"t{name}")

    def settle(self, name: int, late: bool) -> None:
        """A verdict; a late one reaches the broker after a repair."""
        self.mend("done")
        self.held.discard(f"t{name}")
        self.mirror.close(f"t{name}", "trained", "")
        self.live.discard(f"t{name}")
        if late:
            self.mend("done")
        self.broker.close(f"t{name}", "trained")

    def replay(self, name: int) -> None:
        if self.broker.admit(f"t{name}", "g"):
            self.live.add(f"t{name}")
            self.number += 1
            self.broker.replays = self.number
            self.broker.again[f"t{name}"] = self.broker.replays

    def lose(self, writes: int) -> None:
        del self.past[max(1, len(self.past) - writes) :]
        self.broker = copy.deepcopy(self.past[-1])
        self.suspect = True

    def whole(self) -> None:
        if self.suspect:
            self.mend("done")

    def mend(self, outcome: str) -> None:
        self.broker.replays = max(self.broker.replays, self.mirror.replays)
        news = {name for name, number in self.broker.again.items() if number > self.mirror.replays}
        # One that is being admitted counts as soon as the broker has it, be it from an earlier time.
        self.live = self.live & (self.mirror.outstanding.keys() | news) | (
            self.mirror.asked.keys() & self.broker.open.keys()
        )
        repair = self.mirror.compare(self.broker.found(), self.held)
        if outcome == "not done":
            return
        self.broker.do(repair)
        self.suspect = False
        self.live -= {name for name, kept in repair.lost if kept.body is None}
        # Where the answer is lost, the repair's mark says so before anything else is sent.
        self.mirror.repaired(repair, WHY)
        assert self.mirror.outstanding.keys() == self.broker.open.keys() == self.live
        assert self.held <= {name for name, where in self.broker.open.items() if where == "g"}
        # A counter that is 0 need not be there.
        assert +self.mirror.counts == +self.broker.counts
        counts = self.broker.counts
        verdicts = counts["train v trained"] + counts["train v lost"]
        assert counts["train admitted"] == verdicts + len(self.broker.open)
        assert self.mirror.compare(self.broker.found(), self.held).empty


@settings(max_examples=300)
@given(STEPS)
def test_a_broker_is_whole_after_a_repair_whatever_it_forgot(steps: list[tuple[Any, ...]]) -> None:
    walk = Walk()
    for what, *args in steps:
        walk.step(what, *args)
    walk.mend("done")


def mirror_of(*names: str, body: bytes | None = b"body") -> Mirror:
    return Mirror(counts=Counter({"train admitted": len(names)}), outstanding={n: Kept("train", body) for n in names})


def test_what_cannot_be_asked_again_is_only_lost() -> None:
    mirror = mirror_of("a", body=None)
    repair = mirror.compare(Found({}, {}, 0), ())
    assert repair.lost == [("a", Kept("train", None))]
    mirror.repaired(repair, WHY)
    assert mirror.outstanding == {}
    assert mirror.counts == {"train admitted": 1, "train v lost": 1, f"train r lost: {WHY}": 1}


def test_an_entry_that_is_not_there_is_as_good_as_no_task() -> None:
    mirror = mirror_of("a", "b")
    found = Found({"train admitted": 2}, {name: Opened("train", "t", name == "a") for name in "ab"}, 0)
    assert [name for name, _ in mirror.compare(found, ()).lost] == ["b"]


def test_a_verdict_that_is_given_while_its_task_is_asked_again_counts_once() -> None:
    for body, admitted, lost in ((b"body", 2, 1), (None, 1, 0)):
        mirror = mirror_of("a", body=body)
        repair = mirror.compare(Found({}, {}, 0), ())
        mirror.close("a", "failed", "")
        mirror.repaired(repair, WHY)
        assert mirror.outstanding == {}
        assert (mirror.counts["train admitted"], mirror.counts["train v lost"]) == (admitted, lost)
        assert mirror.counts["train v failed"] == 1


def test_what_a_new_trainer_cannot_explain_is_lost() -> None:
    mirror = mirror_of("a")
    mirror.counts.update({"train admitted": 4, "train v trained": 2, "eval admitted": 1, "eval v evaluated": 2})
    mirror.even_out(WHY)
    assert mirror.counts["train v lost"] == mirror.counts[f"train r lost: {WHY}"] == 2
    assert mirror.counts["eval admitted"] == 2


def test_a_task_whose_admission_has_no_answer_counts_once_it_has_a_verdict() -> None:
    mirror = Mirror()
    mirror.ask([(make_task("a"), b"body")])
    mirror.close("a", "failed", "late")
    mirror.close("a", "trained", "")
    assert mirror.counts == {"train admitted": 1, "train v failed": 1, "train r failed: late": 1}


def test_reasons_beyond_the_bound_count_together() -> None:
    mirror = mirror_of(*(f"t{number}" for number in range(2 * MAX_REASONS)))
    for number in range(2 * MAX_REASONS):
        mirror.close(f"t{number}", "failed", f"reason {number}")
    assert mirror.counts["train v failed"] == 2 * MAX_REASONS
    assert mirror.counts["train r failed: other reasons"] == 2 * MAX_REASONS - (len(mirror.counts) - 3)
    assert len(mirror.counts) <= MAX_REASONS + 1
