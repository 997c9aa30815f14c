"""What every broker does with dead letters: list, show, replay and drop them. And where histories begin and fork."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from broker.api import Fence, Reign
from broker.bounds import MAX_DEAD_BYTES
from broker.connect import Run
from broker.messages import StepEntry
from headrace.errors import Refused
from headrace.version import PolicyVersion
from tests.conftest import BROKER, Services
from tests.reigns import begun, closed, reign
from tests.support import make_group, make_task, make_trajectory


async def invalid_group(run: Run, fence: Fence, task_id: str) -> None:
    """The next task is played with a token beyond the vocabulary, and its group buried."""
    (delivery,) = await run.take("p0", 1, 0)
    assert delivery.task.task_id == task_id
    await run.publish("p0", delivery, make_group(delivery.task, delivery.attempt, "p0", vocab=5000))
    (seen,) = await run.take_groups(fence, 1, 0)
    assert (seen.group.outcome, seen.group.task_id) == ("dead", task_id)


async def kill(run: Run, task_id: str) -> None:
    """The next task is delivered once too often."""
    for number in range(BROKER.max_deliveries):
        (delivery,) = await run.take(f"victim{number}", 1, 0)
        assert delivery.task.task_id == task_id
        await run.retire(f"victim{number}")
    assert await run.take("p0", 1, 0) == []


async def test_dead_letters_are_listed_shown_and_dropped(service: Services) -> None:
    run, operator = service(), service()
    fence = await begun(run, "a", "b", "c")
    for name in "abc":
        await invalid_group(run, fence, name)
    letters = await operator.dead("", 10)
    assert [(one.task_id, one.source, one.kind, one.attempt, one.body) for one in letters] == [
        (name, "groups", "train", "1", b"") for name in "abc"
    ]
    assert all(one.reason.startswith("token id") for one in letters)
    assert [one.task_id for one in await operator.dead("", 2)] == ["a", "b"]
    assert [one.task_id for one in await operator.dead(letters[1].letter_id, 2)] == ["c"]
    whole = await operator.dead_letter(letters[0].letter_id)
    assert whole.length == len(whole.body) > 0
    assert whole.sha256 == hashlib.sha256(whole.body).hexdigest()
    assert await operator.drop_dead([letters[0].letter_id, letters[0].letter_id, "nonsense"]) == 1
    assert [one.task_id for one in await operator.dead("", 10)] == ["b", "c"]
    assert (await operator.depths()).dead == 2


@pytest.mark.parametrize("letter_id", ["1-1", "", "$", "nonsense", "9" * 40])
async def test_a_letter_that_is_not_there_is_named(service: Services, letter_id: str) -> None:
    run = service()
    for call in (run.dead_letter(letter_id), run.replay_dead(letter_id)):
        with pytest.raises(Refused, match="is not there"):
            await call
    assert await run.drop_dead([letter_id]) == 0


async def test_a_group_that_is_replayed_comes_again_as_it_was(service: Services) -> None:
    run, operator = service(), service()
    fence = await begun(run, "a")
    await invalid_group(run, fence, "a")
    assert await closed(run) == (1, 0, {"dead": 1})
    (letter,) = await operator.dead("", 10)
    body = (await operator.dead_letter(letter.letter_id)).body
    await operator.replay_dead(letter.letter_id)
    assert await closed(run) == (2, 1, {"dead": 1})
    assert await operator.dead("", 10) == []
    (seen,) = await run.take_groups(fence, 4, 0)
    assert (seen.group.outcome, seen.group.attempt, seen.group.producer) == ("dead", 1, "p0")
    assert await closed(run) == (2, 0, {"dead": 2})
    (letter,) = await operator.dead("", 10)
    assert (await operator.dead_letter(letter.letter_id)).body == body


async def test_a_task_that_is_replayed_is_played_with_all_its_deliveries(service: Services) -> None:
    run, operator = service(), service()
    fence = await begun(run, "a")
    await kill(run, "a")
    (seen,) = await run.take_groups(fence, 1, 0)
    assert seen.group.outcome == "dead"
    (letter,) = await operator.dead("", 10)
    assert (letter.source, letter.attempt) == ("tasks", "4")
    await operator.replay_dead(letter.letter_id)
    assert await closed(run) == (2, 1, {"dead": 1})
    (delivery,) = await run.take("p0", 1, 0)
    assert (delivery.task, delivery.attempt) == (make_task("a"), 5)
    assert await run.publish("p0", delivery, make_group(delivery.task, 5, "p0")) == "published"
    (arrived,) = await run.take_groups(fence, 1, 0)
    await run.settle(fence, [StepEntry(arrived.entry_id, "a", "trained")])
    assert await closed(run) == (2, 0, {"dead": 1, "trained": 1})


async def test_what_cannot_be_replayed_says_why_and_stays(service: Services) -> None:
    run, operator = service(), service()
    fence = await begun(run, "a")
    await invalid_group(run, fence, "a")
    await run.admit(fence, [make_task("a")])
    (letter,) = await operator.dead("", 10)
    with pytest.raises(Refused, match=f"'{letter.letter_id}' belongs to a task that is outstanding again"):
        await operator.replay_dead(letter.letter_id)
    assert len(await operator.dead("", 10)) == 1
    assert await closed(run) == (2, 1, {"dead": 1})


async def test_what_was_cut_is_not_replayed(service: Services) -> None:
    run, operator = service(), service()
    fence = await begun(run, "a")
    (delivery,) = await run.take("p0", 1, 0)
    rng = np.random.default_rng(0)
    many = tuple(make_trajectory(rng, sampled=150_000, vocab=5000) for _ in range(2))
    await run.publish("p0", delivery, replace(make_group(delivery.task, 1, "p0"), trajectories=many))
    await run.take_groups(fence, 1, 0)
    (letter,) = await operator.dead("", 10)
    assert letter.length > MAX_DEAD_BYTES == len((await operator.dead_letter(letter.letter_id)).body)
    with pytest.raises(Refused, match="longer than the 1048576 bytes"):
        await operator.replay_dead(letter.letter_id)
    assert await closed(run) == (1, 0, {"dead": 1})


async def test_the_cursor_is_what_the_newest_admission_said(service: Services) -> None:
    trainer, other = service(), service()
    assert (await other.state()).cursor == 0
    fence = await reign(trainer)
    await trainer.admit(fence, [make_task(f"t{number}") for number in range(300)], cursor=300)
    assert (await other.state()).cursor == 300
    await trainer.admit(fence, [make_task("exam", kind="eval")])
    assert (await other.state()).cursor == 300
    await trainer.admit(fence, [], cursor=301)
    assert (await other.state()).cursor == 301


async def test_reigns_say_what_each_incarnation_published(service: Services) -> None:
    first, second = service(), service()
    assert await first.reigns() == {}
    fence = await first.take_fence(0)
    for step in (0, 1, 3):
        await first.publish_head(fence, PolicyVersion(1, step), b"")
    fence = await second.take_fence(0)
    await second.publish_head(fence, PolicyVersion(2, 2), b"")
    assert await first.reigns() == {1: Reign(0, 3), 2: Reign(2, 2)}
    assert (first.mended, second.mended) == (0, 0)


async def test_only_the_newest_reigns_are_remembered(service: Services) -> None:
    run = service()
    incarnation = 0
    for _ in range(3):
        fence = await run.take_fence(incarnation + 200)
        incarnation = fence.incarnation
        for offset in range(100):
            await run.publish_head(fence, PolicyVersion(incarnation - offset, 1), b"")
    assert await run.reigns() == {number: Reign(1, 1) for number in sorted(await run.reigns())}
    assert len(await run.reigns()) == 256
    assert max(await run.reigns()) == incarnation
    run.hasten()
