"""One member of a group: an episode played against the engine, turn by turn."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from broker.messages import FinishReason, Task, TaskKind
from headrace.config import EnvironmentConfig, SamplingConfig
from headrace.errors import ModelError
from producers.chat import Chat
from producers.engines.api import Completion, Engine, Request, SamplingParams
from producers.environments.api import Done, Environment, Episode, Observation, Rollout, ToolCall, Turn
from producers.environments.calls import Calls, RolloutFailed
from producers.environments.checks import checked_answer, checked_observation
from producers.transcript import Transcript

GOODBYE_S = 1.0
"""What closing the episode of a cancelled rollout may take."""
LETTERS = 256
"""More than any token stands for. A text that cannot fit is not even tokenized: every other rollout would wait a second
for each megabyte of it."""

_requests = itertools.count()

Ask = Callable[..., Awaitable[Any]]
"""`Calls.ask` for one rollout."""


@dataclass(frozen=True, slots=True)
class Player:
    """What all rollouts of a producer share."""

    engine: Engine
    chat: Chat
    sampling: SamplingConfig
    calls: Calls
    """Into environments."""
    limits: Mapping[str, EnvironmentConfig] = field(default_factory=dict)
    """By what tasks call an environment; one that is not there has no limits of its own."""
    asking: Callable[[], AbstractContextManager[None]] = nullcontext
    """Is told of each call that asks the engine for tokens."""
    evaluation: SamplingConfig | None = None
    """How evaluations are sampled, where it is not as training is."""

    def sampling_of(self, kind: TaskKind) -> SamplingConfig:
        return self.evaluation if kind == "eval" and self.evaluation is not None else self.sampling


@dataclass(frozen=True, slots=True)
class Played:
    """A finished rollout, before its reward is known."""

    rollout: Rollout
    transcript: Transcript
    finish_reason: FinishReason
    reward: float | None
    """The final one. None: to be scored."""
    queue_s: float
    decode_s: float

    @property
    def turn_reward(self) -> float:
        """What its observations carried, which counts beside the final reward."""
        return sum(turn.reward for turn in self.rollout.turns)


async def play(
    player: Player, environment: Environment, task: Task, member: int, transcript: Transcript | None = None
) -> Played:
    """Play member `member` (from 0) of a task into a transcript, which others may look at meanwhile.

    Raises RolloutFailed with a reason for what is wrong with this rollout alone, EngineError for a broken engine.
    A cancelled call aborts its request, and waits for its environment for a moment only.
    """
    written = Transcript() if transcript is None else transcript
    ask = partial(player.calls.ask, f"environment {task.environment!r} with task {task.task_id}")
    episode: Episode = await ask(lambda: _episode(environment, task))
    try:
        played = await _Game(player, task, member, episode, written, ask).play()
    except BaseException as error:
        hurry_s = GOODBYE_S if isinstance(error, asyncio.CancelledError) else None
        with suppress(RolloutFailed):  # what ended it is the reason, not what follows from it
            await ask(episode.close, hurry_s, GOODBYE_S)
        raise
    await ask(episode.close, None, GOODBYE_S)
    return played


class _Game:
    """One episode under way."""

    def __init__(
        self, player: Player, task: Task, member: int, episode: Episode, transcript: Transcript, ask: Ask
    ) -> None:
        self._player, self._task, self._member, self._episode = player, task, member, episode
        self._transcript, self._ask = transcript, ask
        self._limits = player.limits.get(task.environment) or EnvironmentConfig(name=task.environment)
        self._turns: list[Turn] = []
        self._first = Observation(())
        self._numbers = itertools.count()
        self._queue_s = self._decode_s = 0.0

    async def play(self) -> Played:
        """Each turn adds at least one token, so the context bounds the number of turns, where nothing else does."""
        self._first = checked_observation(await self._ask(self._episode.reset), first=True)
        self._show_first()
        while True:
            completion = await self._complete()
            turn = Turn(
                self._player.chat.text(completion.token_ids_N), completion.finish_reason, self._tool_calls(completion)
            )
            self._turns.append(turn)
            answer = checked_answer(await self._ask(lambda: self._episode.step(self._turns[-1])))
            if isinstance(answer, Done):
                return await self._played(completion.finish_reason, answer.reward)
            self._turns[-1] = replace(turn, reward=float(answer.reward))
            if len(self._turns) == self._limits.max_turns or not self._show_next(answer, completion):
                return await self._played("length", None)

    @property
    def _room(self) -> int:
        """Tokens that the whole episode may have."""
        context = self._player.engine.context_length
        return min(context, self._limits.max_tokens_per_episode or context)

    def _show_first(self) -> None:
        """Raises RolloutFailed when no answer can follow."""
        if (letters := _letters(self._first)) > LETTERS * self._room:
            raise RolloutFailed(self._no_room(f"{letters} letters"))
        try:
            tokens = self._player.chat.prompt(self._first.messages, self._first.tools)
        except ModelError as error:
            raise RolloutFailed(str(error)) from error
        if not len(tokens):
            raise RolloutFailed("prompt is empty")
        if len(tokens) >= self._room:
            raise RolloutFailed(self._no_room(f"{len(tokens)} tokens"))
        self._transcript.observe(tokens)

    def _no_room(self, size: str) -> str:
        least = "model.context_length"
        if self._room < self._player.engine.context_length:
            least = "max_tokens_per_episode of the environment"
        return f"prompt of {size} leaves no room for an answer in a context of {self._room} ({least})"

    def _show_next(self, observation: Observation, completion: Completion) -> bool:
        """Append what the model sees next. False when no room for an answer is left."""
        if _letters(observation) > LETTERS * self._room:
            return False
        last_token = int(completion.token_ids_N[-1])
        try:
            tokens = self._player.chat.follow_up(observation.messages, last_token, self._first.tools)
        except ModelError as error:
            raise RolloutFailed(str(error)) from error
        if len(self._transcript) + len(tokens) >= self._room:
            return False
        self._transcript.observe(tokens)
        return True

    def _tool_calls(self, completion: Completion) -> tuple[ToolCall, ...]:
        if not self._first.tools:
            return ()
        try:
            calls = self._player.chat.tool_calls(completion.token_ids_N)
        except ModelError as error:
            raise RolloutFailed(str(error)) from error
        return tuple(replace(call, call_id=f"call{next(self._numbers):05d}") for call in calls)

    async def _complete(self) -> Completion:
        engine, sampling = self._player.engine, self._player.sampling_of(self._task.kind)
        turn = len(self._turns)
        request = Request(
            # Numbered: a task that was taken from this producer and comes back is another request.
            request_id=f"{self._task.task_id}/{self._member}/{turn}#{next(_requests)}",
            prompt_ids_P=self._transcript.token_ids(),
            sampling=SamplingParams(
                max_new_tokens=min(
                    self._limits.max_tokens_per_turn or sampling.max_new_tokens, self._room - len(self._transcript)
                ),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                stop_token_ids=self._player.chat.stop_token_ids,
                stop=sampling.stop,
                seed=request_seed(self._task.seed, self._member, turn),
            ),
        )
        self._transcript.request_id = request.request_id
        try:
            with self._player.asking():
                completion = await engine.generate(request)
        except asyncio.CancelledError:
            engine.abort(request.request_id)
            raise
        finally:
            self._transcript.request_id = ""
        self._queue_s += completion.queue_s
        self._decode_s += completion.decode_s
        if completion.finish_reason == "abort":
            self._transcript.lost += len(completion.token_ids_N)
            raise RolloutFailed(f"the engine aborted it{completion.why and f': {completion.why}'}")
        if not len(completion.token_ids_N):
            raise RolloutFailed(f"the engine's answer has no token (it ended with {completion.finish_reason!r})")
        self._transcript.complete(completion)
        return completion

    async def _played(self, finish_reason: FinishReason, reward: float | None) -> Played:
        rollout = Rollout(
            environment=self._task.environment,
            index=self._task.index,
            prompt="\n".join(message.content for message in self._first.messages),
            completion=self._turns[-1].text,
            turns=tuple(self._turns),
            answer=await self._ask(lambda: self._episode.answer),
            finish_reason=finish_reason,
            given=reward,
        )
        return Played(rollout, self._transcript, finish_reason, reward, self._queue_s, self._decode_s)


def request_seed(task_seed: int, member: int, turn: int) -> int:
    """63 bits that differ for every request of a task, and are the same when the task is played again."""
    digest = hashlib.blake2b(f"{task_seed}/{member}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _letters(observation: Observation) -> int:
    return sum(len(message.content) for message in observation.messages)


def _episode(environment: Environment, task: Task) -> Episode:
    """All members play the same index and seed. An index beyond the dataset goes on from its start."""
    split = "train" if task.kind == "train" else "eval"
    size = len(environment) if split == "train" else environment.eval_size()
    if size < 1:
        raise RolloutFailed(f"environment {task.environment!r} has no {split} episodes")
    episode = environment.episode(split, task.index % size, task.seed)
    missing = [name for name in ("reset", "step", "close") if not callable(getattr(episode, name, None))]
    if missing:
        raise RolloutFailed(f"environment gave {type(episode).__name__} as an episode: it has no {', '.join(missing)}")
    return episode
