"""Loss masks, spans and log-probs over random conversations: exact to the token."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.messages import VersionSpan
from broker.validate import Limits, check_group
from headrace.config import SamplingConfig
from headrace.version import PolicyVersion
from producers.chat import Chat, TemplateChat
from producers.engines.api import Completion, Request
from producers.engines.scripted import ScriptedEngine
from producers.environments.api import Done, Message, Observation, Turn
from producers.environments.calls import Calls
from producers.environments.multi_turn import MultiTurn
from producers.group import failed_group
from producers.rollout import Player, play
from producers.transcript import Transcript
from tests.replies import player_of
from tests.rollouts import TASK, Chats
from tests.templates import LLAMA, MISTRAL, PLAIN, QWEN, SPECIAL, byte_chat

VOCABULARY = 64


@dataclass(frozen=True)
class Said:
    """A completion: its tokens, and where its versions change."""

    tokens: tuple[int, ...]
    cuts: tuple[int, ...]
    first_step: int
    kept: bool

    def completion(self, request_id: str = "") -> Completion:
        ends = sorted({cut for cut in self.cuts if 0 < cut < len(self.tokens)} | {len(self.tokens)})
        spans, start = [], 0
        for number, end in enumerate(ends):
            kv = "kept" if self.kept and number else "fresh"
            spans.append(VersionSpan(start, end, PolicyVersion(1, self.first_step + number), kv))  # type: ignore[arg-type]
            start = end
        logprobs = np.array([logprob(token) for token in self.tokens], np.float32)
        return Completion(request_id, np.array(self.tokens, np.int32), logprobs, tuple(spans), "stop", 0.0, 0.0)


def logprob(token: int) -> float:
    """Another one for each token, so that one in the wrong place is seen; none is 0."""
    return -math.log(2 + token)


tokens = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12).map(tuple)
said = st.builds(Said, tokens, st.lists(st.integers(1, 11), max_size=3).map(tuple), st.integers(0, 3), st.booleans())
shown = st.lists(st.integers(0, VOCABULARY - 1), max_size=12).map(tuple)
"""An observation may be empty: what ends an answer can be all that stands between two turns."""


@given(st.lists(shown | said, max_size=12))
def test_the_mask_is_true_exactly_on_sampled_tokens(parts: list[tuple[int, ...] | Said]) -> None:
    transcript = Transcript()
    whole: list[tuple[int, bool]] = []
    versions: dict[int, PolicyVersion] = {}
    for part in parts:
        if isinstance(part, Said):
            completion = part.completion()
            versions.update(
                (len(whole) + place, span.version) for span in completion.spans for place in range(span.start, span.end)
            )
            transcript.complete(completion)
            whole += [(token, True) for token in part.tokens]
        else:
            transcript.observe(np.array(part, np.int32))
            whole += [(token, False) for token in part]
    made = transcript.trajectory(1.0, "stop")

    assert made.token_ids_T.tolist() == [token for token, _ in whole]
    assert made.loss_mask_T.tolist() == [sampled for _, sampled in whole]
    assert made.logprobs_T.tolist() == [np.float32(logprob(token) if sampled else 0.0) for token, sampled in whole]
    covered = {place: span.version for span in made.spans for place in range(span.start, span.end)}
    assert covered == versions
    assert sum(span.end - span.start for span in made.spans) == made.loss_mask_T.sum() == transcript.sampled
    assert [span.start for span in made.spans] == sorted(span.start for span in made.spans)


class Numbers:
    """A chat whose messages are numbers, each a token; 0 ends an answer and is shown after one that was cut."""

    stop_token_ids = (0,)

    def prompt(self, messages: list[Message], tools: object = ()) -> np.ndarray:  # type: ignore[type-arg]
        return np.array([int(word) for message in messages for word in message.content.split()], np.int32)

    def follow_up(self, messages: list[Message], last_token: int, tools: object = ()) -> np.ndarray:  # type: ignore[type-arg]
        more = self.prompt(messages)
        return more if last_token == 0 else np.insert(more, 0, 0).astype(np.int32)

    def text(self, token_ids_N: np.ndarray) -> str:  # type: ignore[type-arg]
        return " ".join(map(str, token_ids_N.tolist()))

    def tool_calls(self, token_ids_N: np.ndarray) -> tuple[()]:  # type: ignore[type-arg]
        return ()


class Says(ScriptedEngine):
    def __init__(self, answers: list[Said]) -> None:
        super().__init__(context_length=10_000)
        self.answers, self.prompts = iter(answers), list[list[int]]()

    async def generate(self, request: Request) -> Completion:
        self.prompts.append(request.prompt_ids_P.tolist())
        return next(self.answers).completion(request.request_id)


@settings(max_examples=60)
@given(st.lists(st.tuples(tokens, said), min_size=1, max_size=6))
def test_a_rollout_is_masked_to_the_token(turns: list[tuple[tuple[int, ...], Said]]) -> None:
    """The real loop of a rollout: what the model was shown before each answer is all that came before it."""
    observations = [" ".join(map(str, observation)) for observation, _ in turns]
    follow_ups = iter(observations[1:])

    def reply(turn: Turn) -> Observation | Done:
        text = next(follow_ups, None)
        return Done(1.0) if text is None else Observation((Message("user", text),))

    engine = Says([answer for _, answer in turns])
    chat: Chat = Numbers()  # type: ignore[assignment]
    player = Player(engine, chat, SamplingConfig(), Calls(5.0))
    environment = Chats(lambda index, seed: MultiTurn(observations[0], None, reply))
    played = asyncio.run(play(player, environment, TASK, 0))
    made = played.transcript.trajectory(1.0, "stop")

    whole: list[tuple[int, bool]] = []
    for number, (observation, answer) in enumerate(turns):
        if number and whole[-1][0] != 0:
            whole.append((0, False))
        whole += [(token, False) for token in observation]
        assert engine.prompts[number] == [token for token, _ in whole]
        whole += [(token, True) for token in answer.tokens]
    assert made.token_ids_T.tolist() == [token for token, _ in whole]
    assert made.loss_mask_T.tolist() == [sampled for _, sampled in whole]
    sampled = [token for token, sampled in whole if sampled]
    assert made.logprobs_T[made.loss_mask_T].tolist() == [np.float32(logprob(token)) for token in sampled]
    assert not made.logprobs_T[~made.loss_mask_T].any()
    covered = [place for span in made.spans for place in range(span.start, span.end)]
    assert covered == np.flatnonzero(made.loss_mask_T).tolist()
    assert check_group(group_of(made), Limits(VOCABULARY, {"train": 1})) is None


said_by_others = (
    st.lists(
        st.sampled_from([*SPECIAL, "<|im_", "end|>", "\n", "\u00e9", '"', " x", "<tool_call>"]), min_size=1, max_size=6
    )
    .map("".join)
    .filter(str.strip)
)


@settings(max_examples=60)
@given(
    st.sampled_from([QWEN, LLAMA, MISTRAL, PLAIN, None]),
    st.lists(st.tuples(said_by_others, st.text("abc", min_size=1, max_size=5)), min_size=1, max_size=4),
)
def test_special_tokens_that_others_say_are_text(template: str | None, turns: list[tuple[str, str]]) -> None:
    """Of the conversation, only what the template writes and the model samples may end a turn."""
    chat = byte_chat(template)
    told, mask = played(chat, turns)
    harmless, same = played(chat, [("~", answer) for _, answer in turns])
    assert special_of(told[~mask]) == special_of(harmless[~same])
    # What was said is there, to the letter, and nothing else has changed.
    rest = chat.written(told)
    for part in chat.written(harmless).split("~")[: len(turns)]:
        said = turns[0][0]
        assert rest.startswith(part + said)
        rest, turns = rest[len(part + said) :], turns[1:]
    # Sampled tokens, each with the end that the model samples, and no others.
    assert chat.written(told[mask]) == chat.written(harmless[same])


def played(chat: TemplateChat, turns: list[tuple[str, str]]) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """Tokens and loss mask of an episode in which others and the model say these things."""
    answers, follow_ups = iter([answer for _, answer in turns]), iter([other for other, _ in turns[1:]])

    def reply(turn: Turn) -> Observation | Done:
        text = next(follow_ups, None)
        return Done(1.0) if text is None else Observation((Message("user", text),))

    player, _ = player_of(lambda shown: next(answers), chat)
    environment = Chats(lambda index, seed: MultiTurn(turns[0][0], None, reply))
    made = asyncio.run(play(player, environment, TASK, 0)).transcript.trajectory(1.0, "stop")
    return made.token_ids_T, made.loss_mask_T


def special_of(token_ids: np.ndarray) -> list[int]:  # type: ignore[type-arg]
    return [token for token in token_ids.tolist() if token >= 256]


def group_of(trajectory: object) -> object:
    from dataclasses import replace

    from broker.messages import TaskDelivery

    group = failed_group(TaskDelivery("1-0", 1, replace(TASK, group_size=1)), "p1", "none")
    return replace(group, trajectories=(trajectory,), failures=(), outcome="played", error="")
