"""Which rollouts are stopped because nobody can use them any more: pure decisions, against what the trainer judges."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from broker.api import Reign
from broker.messages import Group, TaskDelivery, VersionSpan
from consumers.lag import History, group_lag
from headrace.version import PolicyVersion
from producers.engines.api import Completion, Progress
from producers.engines.scripted import ScriptedEngine
from producers.holding import Held
from producers.in_play import InPlay, Member
from producers.stragglers import out_of_reach, stragglers
from producers.transcript import Transcript
from tests.support import make_task

versions = st.builds(PolicyVersion, st.integers(1, 3), st.integers(0, 12))


class Engine(ScriptedEngine):
    """Is just sampling these requests."""

    def __init__(self, **coming: Progress) -> None:
        super().__init__()
        self.coming = coming

    def progress(self, request_id: str) -> Progress | None:
        return self.coming.get(request_id)


def write(transcript: Transcript, *versions: PolicyVersion) -> None:
    """A prompt, then one sampled token of each version."""
    transcript.observe(np.array([1], np.int32))
    spans = tuple(VersionSpan(place, place + 1, version) for place, version in enumerate(versions))
    count = len(versions)
    transcript.complete(Completion("r", np.ones(count, np.int32), -np.ones(count, np.float32), spans, "stop", 0, 0))


def held(*members: tuple[PolicyVersion, ...], kind: str = "train") -> Held:
    """A task whose members have sampled these versions; one without a version waits for a slot."""
    in_play = InPlay(len(members))
    for seat, sampled in zip(in_play.seats, members, strict=True):
        if sampled:
            write(seat.transcript, *sampled)
    return Held(TaskDelivery("1-0", 1, make_task("t", kind=kind, group_size=len(members))), in_play, 10.0, False)


@given(
    members=st.lists(st.lists(versions, max_size=4).map(lambda chosen: tuple(sorted(chosen))), min_size=1, max_size=4),
    head=versions,
    later=st.integers(0, 5),
    forks=st.dictionaries(st.integers(1, 3), st.integers(0, 12)),
    max_lag=st.integers(0, 6),
)
def test_what_is_stopped_is_what_the_trainer_would_drop(
    members: list[tuple[PolicyVersion, ...]], head: PolicyVersion, later: int, forks: dict[int, int], max_lag: int
) -> None:
    """Whenever its batch is formed: at the head's step or later, whatever histories were given up."""
    history = History({incarnation: Reign(step, step) for incarnation, step in forks.items()})
    task = held(*members)
    trajectories = tuple(seat.transcript.trajectory(0.0, "stop") for seat in task.in_play.seats)
    group = Group("t", 1, "train", "arithmetic", 0, "p1", trajectories)
    stopped = stragglers([task], Engine(), head, max_lag)
    if stopped:
        assert group_lag(group, head.step + later, history) > max_lag
    if not forks:
        assert bool(stopped) == (group_lag(group, head.step, history) > max_lag)


def test_only_a_head_and_a_token_make_a_straggler() -> None:
    assert not out_of_reach(None, PolicyVersion(1, 9), 0)
    assert not out_of_reach(PolicyVersion(1, 0), None, 0)
    assert not out_of_reach(PolicyVersion(1, 2), PolicyVersion(1, 4), 2)
    assert out_of_reach(PolicyVersion(1, 2), PolicyVersion(1, 5), 2)
    assert not out_of_reach(PolicyVersion(1, 9), PolicyVersion(2, 5), 2)


def test_what_the_engine_is_sampling_counts_and_what_waits_there_does_not() -> None:
    task, head = held((), ()), PolicyVersion(1, 5)
    for name, seat in zip("ab", task.in_play.seats, strict=True):
        seat.transcript.request_id = name
    assert stragglers([task], Engine(a=Progress(0), b=Progress(3, PolicyVersion(1, 3))), head, 2) == []
    assert stragglers([task], Engine(a=Progress(0), b=Progress(3, PolicyVersion(1, 2))), head, 2) == [task]
    # A later turn is younger than the first one.
    write(task.in_play.seats[0].transcript, PolicyVersion(1, 2))
    assert stragglers([task], Engine(a=Progress(2, PolicyVersion(1, 5))), head, 2) == [task]


class Silent:
    """An engine of one's own that does not tell how far its requests are."""


def test_an_engine_that_does_not_tell_is_not_asked() -> None:
    task = held((), (PolicyVersion(1, 3),))
    task.in_play.seats[0].transcript.request_id = "a"
    assert stragglers([task], Silent(), PolicyVersion(1, 5), 2) == []  # type: ignore[arg-type]
    assert stragglers([task], Silent(), PolicyVersion(1, 6), 2) == [task]  # type: ignore[arg-type]


def test_evaluations_failed_members_and_groups_on_their_way_stop_nothing() -> None:
    old, head = PolicyVersion(1, 0), PolicyVersion(1, 9)
    assert stragglers([held((old,), kind="eval")], Engine(), head, 2) == []
    partly = held((old,), (head,))
    assert stragglers([partly], Engine(), head, 2) == [partly]
    partly.in_play.seats[0].member = Member(None, "the reward broke")
    assert stragglers([partly], Engine(), head, 2) == []
    on_its_way = held((old,))
    on_its_way.publishing = True
    stopped = held((old,))
    stopped.in_play.stop("too old", Engine())
    assert stragglers([on_its_way, stopped], Engine(), head, 2) == []


def test_a_stopped_group_tells_what_each_member_had_sampled() -> None:
    task = held((PolicyVersion(1, 0),) * 2, (), (PolicyVersion(1, 1),))
    engine = Engine(a=Progress(5, PolicyVersion(1, 0)))
    task.in_play.seats[1].transcript.request_id = "a"
    task.in_play.seats[2].member = Member(task.in_play.seats[2].transcript.trajectory(1.0, "stop"))
    task.in_play.stop("too old", engine)
    assert task.in_play.stopped_N == (2, 5, 1)
    assert [member.failure for member in task.in_play.ends()] == ["too old", "too old", ""]
    task.in_play.seats[1].transcript.request_id = ""
    assert task.in_play.sampled(engine) == 8
