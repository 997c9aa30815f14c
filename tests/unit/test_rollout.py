"""One member and one group, played against the scripted engine with bytes as tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import numpy as np
import pytest

from broker.messages import TaskDelivery
from broker.validate import Limits, check_group
from headrace.errors import EngineError
from producers.engines.api import Completion, Request
from producers.engines.scripted import ScriptedEngine
from producers.environments.api import Done, Episode, Message, Observation, ToolCall, Turn
from producers.environments.calls import RolloutFailed
from producers.environments.single_turn import SingleTurn
from producers.group import play_group
from producers.in_play import InPlay
from producers.rewards.worker import Score
from producers.rollout import play, request_seed
from tests.rollouts import FIRST, TASK, Chats, Chatty, Scores, player, stage


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(slots=3, context_length=200, length_mean=6.0)
    await engine.start()
    await engine.commit(FIRST)
    yield engine
    await engine.close()


async def test_turns_become_one_trajectory_with_observations_masked(engine: ScriptedEngine) -> None:
    episode = Chatty(turns=3)
    played = await play(player(engine), Chats(lambda index, seed: episode), TASK, 0)
    trajectory = played.transcript.trajectory(0.5, played.finish_reason)

    assert (played.reward, played.rollout.answer, played.rollout.index) == (0.5, "the end", 5)
    assert episode.closed
    assert len(played.rollout.turns) == 3
    assert played.rollout.completion == played.rollout.turns[-1].text
    mask = trajectory.loss_mask_T
    assert bytes(trajectory.token_ids_T[~mask].astype(np.uint8)).replace(b"\0", b"") == b"hello\ngo on\ngo on\n"
    assert (trajectory.logprobs_T[mask] == np.float32(-np.log(256))).all()
    assert (trajectory.logprobs_T[~mask] == 0).all()
    assert [mask[span.start : span.end].all() for span in trajectory.spans] == [True] * 3
    assert sum(span.end - span.start for span in trajectory.spans) == mask.sum()


async def test_the_same_task_is_played_the_same_again(engine: ScriptedEngine) -> None:
    environment = Chats(lambda index, seed: Chatty(turns=2))
    plays = [await play(player(engine), environment, TASK, member) for member in (0, 0, 1)]
    first, again, other = (bytes(played.transcript.token_ids()) for played in plays)
    assert first == again
    assert first != other
    assert environment.made == [("train", 1, 77)] * 3


def test_requests_have_seeds_of_their_own() -> None:
    seeds = {request_seed(task, member, turn) for task in range(8) for member in range(8) for turn in range(8)}
    assert len(seeds) == 512
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_the_context_ends_a_conversation(engine: ScriptedEngine) -> None:
    played = await play(player(engine), Chats(lambda index, seed: Chatty(turns=1000)), TASK, 0)
    assert played.finish_reason == "length"
    assert played.reward is None
    assert 150 < len(played.transcript) <= 200
    assert played.transcript.trajectory(0.0, "length").loss_mask_T[-1]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("x" * 199, r"prompt of 200 tokens leaves no room for an answer in a context of 200 \(model.context_length\)"),
        ("x" * 198, None),
    ],
)
async def test_a_prompt_must_leave_room_for_an_answer(engine: ScriptedEngine, prompt: str, reason: str | None) -> None:
    environment = Chats(lambda index, seed: SingleTurn(prompt, None))
    if reason is None:
        assert len((await play(player(engine), environment, TASK, 0)).transcript) == 200
        return
    with pytest.raises(RolloutFailed, match=reason):
        await play(player(engine), environment, TASK, 0)


def fault(where: str, kind: type[BaseException]) -> Callable[[str], object]:
    def raise_there(place: str) -> object:
        if place == where:
            raise kind("broken")
        return None

    return raise_there


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize("kind", [KeyError, SystemExit])
async def test_an_environment_that_raises_fails_its_rollout(
    engine: ScriptedEngine, where: str, kind: type[BaseException]
) -> None:
    episode = Chatty(2, fault(where, kind))
    with pytest.raises(RolloutFailed, match=f"environment raised {kind.__name__}: '?broken'?"):
        await play(player(engine), Chats(lambda index, seed: episode), TASK, 0)
    assert episode.closed


class Wrong(Chatty):
    """Gives what no environment should."""

    def __init__(self, first: object, then: object) -> None:
        super().__init__(1)
        self.first, self.then = first, then

    async def reset(self) -> Observation:
        return self.first  # type: ignore[return-value]

    async def step(self, turn: Turn) -> Observation | Done:
        return self.then  # type: ignore[return-value]


class Unanswerable(Chatty):
    """Fails when it is asked for the right answer."""

    @property
    def answer(self) -> str:  # type: ignore[override]
        raise LookupError("nobody knows")


SHOWN = Observation((Message("user", "hello"),))


@pytest.mark.parametrize(
    ("episode", "reason"),
    [
        (Wrong(None, Done()), "gave NoneType where an Observation belongs"),
        (Wrong(Observation((Message("user", None),)), Done()), "messages are not Messages with text"),
        (Wrong(Observation(None), Done()), "messages are not Messages with text"),
        (Wrong(Observation((Message("user", "half \udcff"),)), Done()), "text is not Unicode"),
        (Wrong(Observation(()), Done()), "without messages, which leaves nothing to answer"),
        (Wrong(SHOWN, Observation(())), "without messages, which leaves nothing to answer"),
        (Wrong(SHOWN, Observation((Message("tool", "3", name="half \udcff"),))), "text is not Unicode"),
        (
            Wrong(Observation((Message("assistant", "", (ToolCall("f", {"x": {1}}),)),)), Done()),
            r"messages are not JSON \(TypeError: Object of type set",
        ),
        (Wrong(Observation(SHOWN.messages, tools=({"name": {1}},)), Done()), "tools are not JSON"),
        (Wrong(SHOWN, 0.5), "gave float where an Observation belongs"),
        (object(), "gave object as an episode: it has no reset, step, close"),
        (Unanswerable(1), "environment raised LookupError: nobody knows"),
    ],
)
async def test_an_environment_that_breaks_its_contract_fails_its_rollout(
    engine: ScriptedEngine, episode: Episode, reason: str
) -> None:
    with pytest.raises(RolloutFailed, match=reason):
        await play(player(engine), Chats(lambda index, seed: episode), TASK, 0)


async def test_an_environment_may_answer_without_coroutines(engine: ScriptedEngine) -> None:
    class Plain(SingleTurn):
        def reset(self) -> Observation:  # type: ignore[override]
            return SHOWN

        def step(self, turn: Turn) -> Observation | Done:  # type: ignore[override]
            return Done(0.25)

        def close(self) -> None:  # type: ignore[override]
            return None

    played = await play(player(engine), Chats(lambda index, seed: Plain("?", 3)), TASK, 0)
    assert (played.reward, played.rollout.answer) == (0.25, 3)


async def test_an_environment_that_hangs_fails_its_rollout(engine: ScriptedEngine) -> None:
    class Hangs(Chatty):
        async def step(self, turn: Turn) -> Observation | Done:
            await asyncio.Event().wait()
            raise AssertionError

    with pytest.raises(RolloutFailed, match=r"environment took longer than 0.05 s"):
        await play(player(engine, deadline_s=0.05), Chats(lambda index, seed: Hangs(1)), TASK, 0)


async def test_without_a_held_out_part_there_is_nothing_to_evaluate(engine: ScriptedEngine) -> None:
    with pytest.raises(RolloutFailed, match="'chatty' has no eval episodes"):
        await play(player(engine), Chats(lambda index, seed: Chatty(1), evals=0), replace(TASK, kind="eval"), 0)


async def test_a_cancelled_rollout_frees_its_slot() -> None:
    engine = ScriptedEngine(slots=1, length_mean=1000.0, length_sigma=0.0, step_s=0.001)
    await engine.start()
    await engine.commit(FIRST)
    rollout = asyncio.ensure_future(
        play(player(engine, max_new_tokens=400), Chats(lambda index, seed: Chatty(1)), TASK, 0)
    )
    async with asyncio.timeout(10):
        while not engine.stats().busy_slots:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0)
    rollout.cancel()
    await asyncio.wait({rollout})
    assert engine.stats().busy_slots == engine.stats().waiting == 0
    await engine.close()


class Silent(ScriptedEngine):
    """Takes requests and never answers."""

    def __init__(self) -> None:
        super().__init__(context_length=200)
        self.asked: list[Request] = []
        self.aborted: list[str] = []

    async def generate(self, request: Request) -> Completion:
        self.asked.append(request)
        await asyncio.Event().wait()
        raise AssertionError

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


async def test_a_request_asks_for_no_more_than_the_context_holds_and_is_aborted_when_cancelled() -> None:
    engine = Silent()
    environment = Chats(lambda index, seed: SingleTurn("x" * 189, None))
    rollout = asyncio.ensure_future(play(player(engine, max_new_tokens=16), environment, TASK, 2))
    async with asyncio.timeout(10):
        while not engine.asked:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0)
    (request,) = engine.asked
    assert (len(request.prompt_ids_P), request.sampling.max_new_tokens) == (190, 10)
    assert (request.sampling.stop_token_ids, request.sampling.seed) == ((0,), request_seed(77, 2, 0))
    rollout.cancel()
    await asyncio.wait({rollout})
    assert engine.aborted == [request.request_id]


async def test_a_group_is_played_scored_and_valid(engine: ScriptedEngine) -> None:
    scorer = Scores(*(Score(reward, correct=reward > 1) for reward in (0.0, 1.0, 2.0, 3.0)))
    environment = Chats(lambda index, seed: SingleTurn("?", index))
    here = stage(player(engine), environment, scorer)
    in_play = InPlay(4)
    group = await play_group(here, TaskDelivery("1-0", 2, TASK), in_play, 60.0)

    assert check_group(group, Limits(256, {"train": 4})) is None
    assert (group.task_id, group.attempt, group.producer, group.error, group.failures) == ("t1", 2, "p1", "", ())
    assert sorted(trajectory.reward for trajectory in group.trajectories) == [0.0, 1.0, 2.0, 3.0]
    assert all(trajectory.correct is (trajectory.reward > 1) for trajectory in group.trajectories)
    assert set(group.seconds) == {"queue", "decode", "score", "total"}
    assert group.seconds["total"] >= group.seconds["decode"] > 0
    assert (in_play.playing, in_play.scoring) == (0, 0)
    assert scorer.kinds == ["train"] * 4


async def test_an_episode_that_gives_its_reward_is_not_scored_unless_the_user_named_a_reward(
    engine: ScriptedEngine,
) -> None:
    environment, scorer = Chats(lambda index, seed: Chatty(1)), Scores()
    here = stage(player(engine), environment, scorer)
    group = await play_group(here, TaskDelivery("1-0", 1, TASK), InPlay(4), 60.0)
    assert [(trajectory.reward, trajectory.correct) for trajectory in group.trajectories] == [(0.5, None)] * 4
    assert scorer.kinds == []
    named = await play_group(
        replace(here, rewarded=frozenset({"chatty"})), TaskDelivery("1-0", 1, TASK), InPlay(4), 60.0
    )
    assert [trajectory.reward for trajectory in named.trajectories] == [1.0] * 4
    await play_group(here, TaskDelivery("1-0", 1, replace(TASK, kind="eval")), InPlay(4), 60.0)
    assert scorer.kinds == ["train"] * 4 + ["eval"] * 4


async def test_failed_members_leave_the_group(engine: ScriptedEngine) -> None:
    scorer = Scores(Score(1.0), Score(failure="reward raised ValueError: no"), Score(1.0), Score(1.0))
    here = stage(player(engine), Chats(lambda index, seed: SingleTurn("?", 1)), scorer)
    group = await play_group(here, TaskDelivery("1-0", 1, TASK), InPlay(4), 60.0)
    assert len(group.trajectories) == 3
    assert group.failures == ("reward raised ValueError: no",)
    assert group.error == ""


async def test_a_group_with_too_few_good_members_has_failed(engine: ScriptedEngine) -> None:
    scorer = Scores(Score(1.0), *[Score(failure="reward took longer than 10 s")] * 3)
    here = stage(player(engine), Chats(lambda index, seed: SingleTurn("?", 1)), scorer)
    group = await play_group(here, TaskDelivery("1-0", 1, TASK), InPlay(4), 60.0)
    assert group.trajectories == ()
    assert group.error == "3 of 4 rollouts failed: reward took longer than 10 s"
    assert check_group(group, Limits(256, {"train": 4})) is None


async def test_an_unknown_environment_is_a_failed_group(engine: ScriptedEngine) -> None:
    here = stage(player(engine), Chats(lambda index, seed: Chatty(1)), Scores())
    in_play = InPlay(4)
    group = await play_group(here, TaskDelivery("1-0", 1, replace(TASK, environment="other")), in_play, 60.0)
    assert "environment 'other' is not one of the run's: chatty" in group.error
    assert in_play.playing == 0


async def test_a_broken_engine_is_an_error_of_the_service(engine: ScriptedEngine) -> None:
    await engine.close()
    here = stage(player(engine), Chats(lambda index, seed: Chatty(1)), Scores())
    with pytest.raises(ExceptionGroup) as caught:
        await play_group(here, TaskDelivery("1-0", 1, TASK), InPlay(4), 60.0)
    assert caught.group_contains(EngineError)
