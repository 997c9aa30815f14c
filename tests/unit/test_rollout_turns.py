"""Episodes of several turns: limits, rewards per turn, and that every episode is closed once, whatever happens."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from broker.messages import TaskDelivery
from headrace.config import EnvironmentConfig
from headrace.errors import ConfigError, EngineError, HeadraceError, ServiceError
from producers.chat import ByteChat
from producers.engines.api import Completion, Request
from producers.environments.api import Done, Environment, Message, Observation, Rollout, Turn
from producers.environments.calls import RolloutFailed
from producers.environments.multi_turn import MultiTurn
from producers.group import play_group
from producers.in_play import InPlay
from producers.rewards.worker import Score
from producers.rollout import Player, play
from tests.replies import Replies, player_of
from tests.rollouts import TASK, Chats, Chatty, Scores, stage


def counting(limit: int = 1000, reward: float = 0.0) -> Environment:
    """Replies to the n-th turn with "n", and is done after `limit` turns."""

    def episode(index: int, seed: int) -> MultiTurn:
        numbers = itertools.count(1)

        def reply(turn: Turn) -> Observation | Done:
            number = next(numbers)
            return Done() if number == limit else Observation((Message("user", str(number)),), reward=reward * number)

        return MultiTurn("start", "the answer", reply)

    return Chats(episode)


async def test_a_conversation_goes_on_until_its_end() -> None:
    player, engine = player_of(lambda shown: f"I saw {len(shown)}")
    played = await play(player, counting(3), TASK, 0)
    assert [turn.text for turn in played.rollout.turns] == ["I saw 6", "I saw 15", "I saw 25"]
    assert bytes(played.transcript.token_ids().astype("uint8")) == b"start\nI saw 6\x001\nI saw 15\x002\nI saw 25\x00"
    assert [len(request.prompt_ids_P) for request in engine.asked] == [6, 16, 27]
    assert (played.finish_reason, played.reward, played.rollout.answer) == ("stop", None, "the answer")


async def test_the_turn_limit_ends_an_episode_that_goes_on() -> None:
    player, engine = player_of(lambda shown: "x", max_turns=4)
    played = await play(player, counting(reward=0.5), TASK, 0)
    assert len(engine.asked) == len(played.rollout.turns) == 4
    # The last turn was seen by the environment and has its reward; what it was answered is not shown any more.
    assert [turn.reward for turn in played.rollout.turns] == [0.5, 1.0, 1.5, 2.0]
    assert played.transcript.token_ids()[-1] == 0
    assert (played.finish_reason, played.rollout.finish_reason, played.reward) == ("length", "length", None)


@pytest.mark.parametrize("first", [True, False])
async def test_a_text_that_cannot_fit_is_not_even_tokenized(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    huge, tokenized = "x" * 10_000_000, list[int]()
    tokens = ByteChat._tokens
    monkeypatch.setattr(ByteChat, "_tokens", lambda self, text: tokenized.append(len(text)) or tokens(self, text))
    player, _ = player_of(lambda shown: "x")
    answer = Observation((Message("user", huge),))
    playing = play(player, Chats(lambda *_: MultiTurn(huge if first else "start", "", lambda turn: answer)), TASK, 0)
    if first:
        with pytest.raises(RolloutFailed, match="prompt of 10000000 letters leaves no room for an answer in a context"):
            await playing
    else:
        assert (await playing).finish_reason == "length"
    assert max(tokenized, default=0) < 100


async def test_an_episode_that_ends_with_its_last_turn_was_not_cut() -> None:
    player, _ = player_of(lambda shown: "x", max_turns=4)
    assert (await play(player, counting(4), TASK, 0)).finish_reason == "stop"


async def test_a_turn_has_its_own_limit() -> None:
    player, engine = player_of(lambda shown: "a long answer", max_tokens_per_turn=3)
    played = await play(player, counting(2), TASK, 0)
    assert [request.sampling.max_new_tokens for request in engine.asked] == [3, 3]
    assert [(turn.text, turn.finish_reason) for turn in played.rollout.turns] == [("a l", "length")] * 2
    # What ends an answer that was cut is shown, not sampled.
    assert bytes(played.transcript.token_ids().astype("uint8")) == b"start\na l\x001\na l"
    assert played.transcript.sampled == 6


async def test_an_episode_has_a_limit_of_tokens() -> None:
    player, engine = player_of(lambda shown: "12345", max_tokens_per_episode=24)
    played = await play(player, counting(), TASK, 0)
    assert len(played.transcript) <= 24
    assert (len(played.rollout.turns), played.finish_reason) == (3, "length")
    assert engine.asked[-1].sampling.max_new_tokens == 24 - len(engine.asked[-1].prompt_ids_P)
    player, _ = player_of(lambda shown: "12345", max_tokens_per_episode=6)
    with pytest.raises(RolloutFailed, match=r"prompt of 6 tokens .* context of 6 \(max_tokens_per_episode of the env"):
        await play(player, counting(), TASK, 0)


async def test_limits_are_those_of_the_own_environment() -> None:
    player, _ = player_of(lambda shown: "x")
    limits = {"other": EnvironmentConfig(name="other", max_turns=1)}
    other = Player(player.engine, player.chat, player.sampling, player.calls, limits)
    assert len((await play(other, counting(7), TASK, 0)).rollout.turns) == 7


@pytest.mark.parametrize(
    ("rewarded", "kind", "reward"),
    [(False, "train", 10.0 + 0.5 + 1.0), (True, "train", 10.0), (False, "eval", 10.0)],
)
async def test_rewards_of_turns_add_to_the_final_one_unless_the_run_has_its_own(
    rewarded: bool, kind: str, reward: float
) -> None:
    player, _ = player_of(lambda shown: "x")
    seen: list[Rollout] = []

    class Scorer(Scores):
        async def score(self, name: str, kind: str, rollout: Rollout) -> Score:
            seen.append(rollout)
            return Score(10.0)

    here = stage(player, counting(3, reward=0.5), Scorer(), rewarded=frozenset({"chatty"} if rewarded else ()))
    task = replace(TASK, kind=kind)
    group = await play_group(here, TaskDelivery("1-0", 1, task), InPlay(4), 60.0)
    assert [trajectory.reward for trajectory in group.trajectories] == [reward] * 4
    assert [turn.reward for turn in seen[0].turns] == [0.5, 1.0, 0.0]


async def test_a_final_reward_of_the_episode_is_added_to_those_of_its_turns() -> None:
    replies = iter([Observation((Message("user", "on"),), reward=0.25), Done(2.0)])
    player, _ = player_of(lambda shown: "x")
    here = stage(player, Chats(lambda index, seed: MultiTurn("?", 0, lambda turn: next(replies))), Scores())
    task = replace(TASK, group_size=1)
    group = await play_group(here, TaskDelivery("1-0", 1, task), InPlay(1), 60.0)
    assert [trajectory.reward for trajectory in group.trajectories] == [2.25]


@pytest.mark.parametrize("reward", [float("nan"), 10**400, np.array([1.0, 2.0]), "much"])
async def test_a_final_reward_that_is_none_fails_the_rollout(reward: object) -> None:
    player, _ = player_of(lambda shown: "x")
    here = stage(player, Chats(lambda index, seed: MultiTurn("?", 0, lambda turn: Done(reward))), Scores())  # type: ignore[arg-type]
    group = await play_group(here, TaskDelivery("1-0", 1, TASK), InPlay(4), 60.0)
    assert "4 of 4 rollouts failed: reward " in group.error


@pytest.mark.parametrize(
    "reward", [float("nan"), float("inf"), 1e13, 10**400, pytest.param(10**5000, id="huge"), "much", None]
)
async def test_a_reward_that_is_none_fails_the_rollout(reward: object) -> None:
    player, _ = player_of(lambda shown: "x")
    observation = Observation((Message("user", "on"),), reward=reward)  # type: ignore[arg-type]
    with pytest.raises(RolloutFailed, match=r"gave an Observation with reward .*, not a number"):
        await play(player, Chats(lambda index, seed: MultiTurn("?", 0, lambda turn: observation)), TASK, 0)


@pytest.mark.parametrize("error", [ConfigError, EngineError, ServiceError])
async def test_errors_of_headraces_own_kinds_are_the_episodes_when_it_raises_them(error: type[HeadraceError]) -> None:
    """An environment may call headrace: what fails there is no failure of the producer."""

    def reply(turn: Turn) -> Done:
        raise error("no such key")

    player, _ = player_of(lambda shown: "x")
    with pytest.raises(RolloutFailed, match=f"environment raised {error.__name__}: no such key"):
        await play(player, Chats(lambda index, seed: MultiTurn("?", 0, reply)), TASK, 0)


@pytest.mark.parametrize("reward", [np.float32(0.25), np.float64(0.25), np.array(0.25), Fraction(1, 4)])
async def test_a_reward_may_be_a_number_of_any_library(reward: object) -> None:
    player, _ = player_of(lambda shown: "x")
    answers = iter([Observation((Message("user", "on"),), reward=reward), Done(1.0)])  # type: ignore[arg-type]
    played = await play(player, Chats(lambda index, seed: MultiTurn("?", 0, lambda turn: next(answers))), TASK, 0)
    assert played.turn_reward == 0.25
    assert type(played.turn_reward) is float


async def test_the_first_observation_has_no_reward_and_tools_are_schemas() -> None:
    class First(Chatty):
        def __init__(self, observation: Observation) -> None:
            super().__init__(1)
            self.observation = observation

        async def reset(self) -> Observation:
            return self.observation

    player, _ = player_of(lambda shown: "x")
    rewarded = First(Observation((Message("user", "?"),), reward=1.0))
    with pytest.raises(RolloutFailed, match=r"first Observation reward 1.0, but there is no turn before"):
        await play(player, Chats(lambda index, seed: rewarded), TASK, 0)
    broken = First(Observation((Message("user", "?"),), tools=("add",)))  # type: ignore[arg-type]
    with pytest.raises(RolloutFailed, match="tools are not a tuple of schemas"):
        await play(player, Chats(lambda index, seed: broken), TASK, 0)


class Closing(Chatty):
    """Counts how often it is reset and closed; closing takes as long as `slow`."""

    def __init__(self, turns: int = 2, slow: asyncio.Event | None = None, **faults: object) -> None:
        super().__init__(turns)
        self.slow, self.faults = slow, faults
        self.resets = self.closes = self.closed_whole = 0
        self.stepping = asyncio.Event()

    async def reset(self) -> Observation:
        self.resets += 1
        if "reset" in self.faults:
            raise RuntimeError("no reset")
        return await super().reset()

    async def step(self, turn: Turn) -> Observation | Done:
        self.stepping.set()
        if "hang" in self.faults:
            await asyncio.Event().wait()
        if "step" in self.faults:
            raise RuntimeError("no step")
        return await super().step(turn)

    async def close(self) -> None:
        self.closes += 1
        self.stepping.set()
        if self.slow is not None:
            await self.slow.wait()
        self.closed_whole += 1
        if "close" in self.faults:
            raise RuntimeError("no close")


class Breaks(Replies):
    async def generate(self, request: Request) -> Completion:
        raise EngineError("broken")


class Aborts(Replies):
    async def generate(self, request: Request) -> Completion:
        completion = await super().generate(request)
        return Completion(
            request.request_id, completion.token_ids_N[:0], completion.logprobs_N[:0], (), "abort", 0.0, 0.0
        )


@pytest.mark.parametrize(
    ("faults", "why"),
    [
        (("reset",), "no reset"),
        (("step",), "no step"),
        (("hang",), "took longer than"),
        (("close",), "no close"),
        (("step", "close"), "no step"),
    ],
)
async def test_an_episode_is_reset_and_closed_once_when_it_fails(faults: tuple[str, ...], why: str) -> None:
    episode = Closing(**dict.fromkeys(faults, True))
    player, _ = player_of(lambda shown: "x", deadline_s=0.1 if "hang" in faults else 5.0)
    with pytest.raises(RolloutFailed, match=why):
        await play(player, Chats(lambda index, seed: episode), TASK, 0)
    assert (episode.resets, episode.closes) == (1, 1)


@pytest.mark.parametrize(("engine", "kind"), [(Breaks, EngineError), (Aborts, RolloutFailed)])
async def test_an_episode_is_closed_once_when_its_engine_fails(engine: type[Replies], kind: type[Exception]) -> None:
    episode = Closing()
    player, _ = player_of(lambda shown: "x")
    broken = Player(engine(player.chat, lambda shown: "x"), player.chat, player.sampling, player.calls)
    with pytest.raises(kind):
        await play(broken, Chats(lambda index, seed: episode), TASK, 0)
    assert (episode.resets, episode.closes, episode.closed_whole) == (1, 1, 1)


async def test_an_episode_is_closed_once_when_it_is_cancelled_in_a_step() -> None:
    episode = Closing(hang=True)
    player, _ = player_of(lambda shown: "x")
    rollout = asyncio.ensure_future(play(player, Chats(lambda index, seed: episode), TASK, 0))
    await episode.stepping.wait()
    rollout.cancel()
    await asyncio.wait({rollout})
    assert rollout.cancelled()
    assert (episode.resets, episode.closes, episode.closed_whole) == (1, 1, 1)


async def test_an_episode_that_is_cancelled_while_it_closes_may_finish_closing() -> None:
    let_go = asyncio.Event()
    episode = Closing(turns=1, slow=let_go)
    player, _ = player_of(lambda shown: "x")
    rollout = asyncio.ensure_future(play(player, Chats(lambda index, seed: episode), TASK, 0))
    await episode.stepping.wait()
    episode.stepping.clear()
    await episode.stepping.wait()  # it closes
    rollout.cancel()
    await asyncio.sleep(0)
    assert not rollout.done()
    let_go.set()
    await asyncio.wait({rollout})
    assert rollout.cancelled()
    assert (episode.closes, episode.closed_whole) == (1, 1)


async def test_members_play_beside_each_other() -> None:
    """Each waits in its first step until all of the group are there."""
    there: list[int] = []
    together = asyncio.Event()

    def episode(index: int, seed: int) -> MultiTurn:
        async def reply(turn: Turn) -> Done:
            there.append(1)
            if len(there) == TASK.group_size:
                together.set()
            await together.wait()
            return Done(1.0)

        return MultiTurn("?", 0, reply)

    player, _ = player_of(lambda shown: "x")
    group = await play_group(stage(player, Chats(episode), Scores()), TaskDelivery("1-0", 1, TASK), InPlay(4), 60.0)
    assert len(group.trajectories) == 4


async def test_the_deadline_of_a_task_closes_its_episodes() -> None:
    episodes: list[Closing] = []

    def episode(index: int, seed: int) -> Closing:
        episodes.append(Closing(hang=True))
        return episodes[-1]

    player, _ = player_of(lambda shown: "x")
    group = await play_group(stage(player, Chats(episode), Scores()), TaskDelivery("1-0", 1, TASK), InPlay(4), 0.2)
    assert "the task's deadline passed" in group.error
    assert [(each.resets, each.closes, each.closed_whole) for each in episodes] == [(1, 1, 1)] * 4
