"""Environments of the package verifiers, played by the rollout loop: the same loop that plays every other one."""

from __future__ import annotations

import asyncio
import pickle
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from headrace.config import EnvironmentConfig
from headrace.errors import EnvironmentLoadError
from producers.engines.scripted import ScriptedEngine
from producers.environments.api import Done, Observation, Rollout, ToolCall, Turn
from producers.environments.calls import RolloutFailed
from producers.environments.registry import build_environment, sizes_of
from producers.rewards.scorer import Scorer
from producers.rollout import play
from tests.rollouts import FIRST, TASK, player

pytest.importorskip("verifiers", reason="`make verifiers` installs what this needs")
PUBLISHED = "sophistry-bench-sprint"


def verifiers(environment: str, *, held_out: int = 0, **args: Any) -> Any:
    name = environment if environment == PUBLISHED else f"tests.verifiers_games:{environment}"
    options = {"environment": name, "args": args, "held_out": held_out}
    return build_environment(EnvironmentConfig(name="verifiers", options=options))


def texts(given: Observation | Done) -> list[tuple[str, str]]:
    assert isinstance(given, Observation)
    return [(message.role, message.content) for message in given.messages]


async def ended(episode: Any, *turns: Turn) -> Rollout:
    """The rollout of an episode that was played with these turns, as it arrives where it is scored."""
    answer = await episode.answer
    await episode.close()
    rollout = Rollout("verifiers", 0, "", turns[-1].text, turns, answer, "stop")
    back: Rollout = pickle.loads(pickle.dumps(rollout))
    return back


async def one_turn(episode: Any) -> None:
    """Of two requests at the same time, the second may come after the first was answered."""
    await episode.reset()
    await episode.step(Turn("5", "stop"))


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(slots=3, context_length=4000, length_mean=20.0)
    await engine.start()
    await engine.commit(FIRST)
    yield engine
    await engine.close()


async def test_a_published_environment_runs_unchanged(engine: ScriptedEngine) -> None:
    environment = verifiers(PUBLISHED, n_items=4, passage_chars=300)
    assert sizes_of("verifiers", environment) == (8, 0)
    played = await play(player(engine), environment, TASK, 0)
    prompt = bytes(played.transcript.token_ids().astype(np.uint8)).decode("utf-8", errors="replace")
    assert "You are arguing for an answer to a reading-comprehension question." in prompt
    assert played.reward is None
    assert await environment.score(played.rollout) == await environment.score(
        pickle.loads(pickle.dumps(played.rollout))
    )

    episode = environment.episode("train", 0, 0)
    passage = " ".join(episode._row["info"]["passage"].split())
    await episode.reset()
    claims = (f"<claim>Point {n} of mine.</claim>\n<cite>{passage[9 * n : 9 * n + 60]}</cite>" for n in range(8))
    good = Turn("\n".join(claims), "stop")
    assert await episode.step(good) == Done()
    rollout = await ended(episode, good)
    assert await environment.score(rollout) > await environment.score(played.rollout)
    assert await environment.correct(rollout)


async def test_a_rubric_scores_in_the_processes_that_score_everything(engine: ScriptedEngine) -> None:
    options = {"environment": PUBLISHED, "args": {"n_items": 4, "passage_chars": 300}}
    config = EnvironmentConfig(name="verifiers", options=options)
    played = await play(player(engine), build_environment(config), TASK, 0)
    scorer = Scorer({"verifiers": config}, workers=1, deadline_s=30.0)
    try:
        train = await scorer.score("verifiers", "train", played.rollout)
        held_out = await scorer.score("verifiers", "eval", played.rollout)
    finally:
        await scorer.close()
    assert (train.reward, train.correct, train.failure) == (0.5, True, "")
    assert (held_out.reward, held_out.failure) == (1.0, "")


async def test_turns_become_one_conversation() -> None:
    environment = verifiers("guessing")
    episode = environment.episode("train", 3, 0)
    assert texts(await episode.reset()) == [("system", "Guess."), ("user", "guess 3")]
    assert texts(await episode.step(Turn("5", "stop"))) == [("user", "wrong 1")]
    assert texts(await episode.step(Turn("", "stop"))) == [("user", "wrong 2")]
    last = Turn("3", "stop")
    assert await episode.step(last) == Done()
    rollout = await ended(episode, last)
    assert await environment.score(rollout) == pytest.approx(0.8)
    assert await environment.correct(rollout)


async def test_a_whole_rollout_is_exact_to_the_token(engine: ScriptedEngine) -> None:
    environment = verifiers("guessing")
    played = await play(player(engine), environment, TASK, 0)
    trajectory = played.transcript.trajectory(0.0, played.finish_reason)
    shown = bytes(trajectory.token_ids_T[~trajectory.loss_mask_T].astype(np.uint8)).replace(b"\0", b"")
    assert shown == b"Guess.\nguess 5\nwrong 1\nwrong 2\nwrong 3\nwrong 4\n"
    assert len(played.rollout.turns) == 5
    assert (trajectory.logprobs_T[trajectory.loss_mask_T] == np.float32(-np.log(256))).all()
    assert await environment.score(played.rollout) == 0.0
    assert not await environment.correct(played.rollout)


async def test_tools_are_called_through_the_template() -> None:
    environment = verifiers("tools")
    episode = environment.episode("train", 5, 0)
    shown = await episode.reset()
    (tool,) = shown.tools
    assert tool["function"]["name"] == "add"
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    call = ToolCall("add", {"a": 2, "b": 3}, "call00000")
    answered = await episode.step(Turn("<call>", "stop", (call,)))
    (message,) = answered.messages
    assert (message.role, message.content, message.tool_call_id, message.name) == ("tool", "5", "call00000", "add")
    unreadable = ToolCall("add", {}, "call00001", error="no JSON")
    last = Turn("5", "stop", (unreadable,))
    assert await episode.step(last) == Done()
    assert await environment.score(await ended(episode, last)) == 1.0


async def test_a_limit_of_the_run_ends_the_environment_as_a_full_context_does() -> None:
    environment = verifiers("guessing")
    episode = environment.episode("train", 2, 0)
    await episode.reset()
    last = Turn("2 or 3", "stop")
    await episode.step(last)
    before = type(environment._environment).closed
    rollout = await ended(episode, last)
    assert type(environment._environment).closed == before + 1
    assert pickle.loads(rollout.answer.state)["is_truncated"]
    assert await environment.score(rollout) == 0.0


async def test_the_context_ends_a_rollout(engine: ScriptedEngine) -> None:
    small = ScriptedEngine(slots=1, context_length=40, length_mean=8.0)
    await small.start()
    await small.commit(FIRST)
    played = await play(player(small), verifiers("guessing"), TASK, 0)
    assert played.finish_reason == "length"
    assert played.rollout.answer.state
    await small.close()


async def test_a_state_that_cannot_leave_its_process_is_scored_in_it() -> None:
    environment = verifiers("with_lock")
    episode = environment.episode("train", 1, 0)
    await episode.reset()
    last = Turn("1", "stop")
    await episode.step(last)
    rollout = await ended(episode, last)
    assert (rollout.answer.state, rollout.answer.reward) == (b"", 1.0)
    assert await environment.score(rollout) == 1.0


async def test_a_rewritten_conversation_fails_its_rollout() -> None:
    episode = verifiers("rewriting").episode("train", 3, 0)
    await episode.reset()
    with pytest.raises(
        RolloutFailed, match=r"message 1 of the conversation, of the user, was 'guess 3' and is now 'wrong"
    ):
        await episode.step(Turn("5", "stop"))
    await episode.close()


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("several", "n = 2 and stream = False; only one whole completion"),
        ("parallel", "several completions at the same time, in one rollout|it can only be continued"),
        ("text", "/v1/completions instead of /chat/completions"),
        ("json", "parameters response_format"),
        ("stream", "stream = True"),
        ("picture", "a message has content that is not text"),
    ],
)
async def test_what_cannot_be_trained_on_fails_its_rollout(how: str, sentence: str) -> None:
    episode = verifiers("asking", how=how).episode("train", 0, 0)
    with pytest.raises(RolloutFailed, match=sentence):
        await one_turn(episode)
    await episode.close()


@pytest.mark.parametrize(("error", "reason"), [("theirs", "Error: no more"), ("any", "LookupError: nothing there")])
async def test_an_environment_that_fails_fails_its_rollout(engine: ScriptedEngine, error: str, reason: str) -> None:
    with pytest.raises(RolloutFailed, match=reason):
        await play(player(engine), verifiers("failing", error=error), TASK, 0)


async def test_one_that_goes_on_after_the_context_is_full_fails() -> None:
    episode = verifiers("deaf").episode("train", 0, 0)
    await episode.reset()
    await episode.step(Turn("5", "stop"))
    with pytest.raises(RolloutFailed, match="goes on asking after it was told that the context is full"):
        await episode.answer
    await episode.close()


async def test_a_closed_rollout_is_cleaned_up(engine: ScriptedEngine) -> None:
    environment = verifiers("guessing")
    episode = environment.episode("train", 0, 0)
    await episode.reset()
    before = type(environment._environment).closed
    await episode.close()
    assert type(environment._environment).closed == before + 1
    await episode.close()


async def test_it_is_torn_down_once() -> None:
    environment = verifiers("guessing")
    before = type(environment._environment).torn
    await environment.teardown()
    await environment._environment._teardown()  # what the package calls as the process ends
    assert type(environment._environment).torn == before + 1


def test_rows_are_held_out() -> None:
    assert sizes_of("verifiers", verifiers("with_eval")) == (5, 2)
    environment = verifiers("guessing", held_out=2)
    assert sizes_of("verifiers", environment) == (4, 2)
    first = asyncio.run(_prompt(environment, "eval", 0))
    assert first == "guess 4"
    assert asyncio.run(_prompt(environment, "train", 3)) == "guess 3"


async def _prompt(environment: Any, split: str, index: int) -> str:
    episode = environment.episode(split, index, 0)
    shown = await episode.reset()
    await episode.close()
    return str(shown.messages[-1].content)


@pytest.fixture
def handlers() -> Iterator[dict[int, Any]]:
    mine = {number: lambda *_: None for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: signal.signal(number, handler) for number, handler in mine.items()}
    yield mine
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_process_keeps_its_signals(handlers: dict[int, Any]) -> None:
    verifiers("guessing")
    assert {number: signal.getsignal(number) for number in handlers} == handlers


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"environment": "no-such-environment"}, "does not load with args {} .*no_such_environment"),
        (
            {"environment": PUBLISHED, "args": {"quality_json": "no/such.json"}},
            r"does not load with args .*no/such.json",
        ),
        ({"environment": "tests.verifiers_games:nothing"}, "is int, not an Environment"),
        ({"environment": "tests.verifiers_games:relative"}, "rewards rollouts relative to each other"),
        ({"environment": "tests.verifiers_games:absent"}, "has no object 'absent'"),
        ({"environment": "tests.verifiers_games:guessing", "held_out": 6}, "held_out = 6 of the 6 rows"),
        ({"environment": "tests.verifiers_games:with_eval", "held_out": 1}, "has held-out rows of its own"),
        ({"environment": "tests.verifiers_games:guessing", "args": {"max_turns": 3}}, "multiple values"),
        ({}, "cannot be made with options {}: it needs environment"),
    ],
)
def test_what_does_not_load_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EnvironmentLoadError, match=sentence) as caught:
        build_environment(EnvironmentConfig(name="verifiers", options=options))
    assert "\n" not in str(caught.value)
