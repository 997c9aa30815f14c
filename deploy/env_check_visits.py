"""Visits to an environment: its methods called one by one, as rollouts call them, and what each gave."""

from __future__ import annotations

import asyncio
import pickle
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Protocol

from deploy.env_check_clock import BLOCKS_S, Clock
from headrace.config import Config, EnvironmentConfig
from headrace.errors import ModelError
from headrace.objects import reason, shortened
from producers.chat import Chat, TemplateChat
from producers.environments.api import Done, Environment, Observation, Rollout, Turn
from producers.environments.calls import Calls, RolloutFailed
from producers.environments.checks import checked_answer, checked_observation
from producers.rewards.worker import judged
from producers.rollout import LETTERS
from producers.round_trip import difference

ANSWERS = ("42", "I do not know.", "", "<tool_call>{}</tool_call> … é 你好 " * 8)
"""What the visitor says, turn by turn."""
MOST_TURNS = 64
_NUMBERS = re.compile(r"(train|eval) prompt|[\d.]+(e-?\d+)?")
EPISODE = ("reset", "step", "close")
OVERLAP_S = 10.0
"""For the search for prompts that are in both splits."""
MOST_PROMPTS = 1000

WAYS_OUT = {
    "environment took longer": "answer sooner, or raise producer.reward_deadline_s",
    "environment raised": "a rollout of such a prompt would fail; handle it, or leave the prompt out",
    "environment gave": "producers/environments/api.py says what is expected",
    "environment cancelled": "it must not cancel the task that it is called in",
}


class Tells(Protocol):
    """Who is told; `deploy.env_check_child.Teller` is."""

    def at(self, what: str, limit_s: float) -> None: ...

    def found(self, level: str, sentence: str) -> None: ...

    def facts(self, **facts: Any) -> None: ...


@dataclass(slots=True)
class Visit:
    """One episode that was played to its end."""

    observations: list[Observation]
    turns: list[Turn]
    answer: Any
    reward: float | None
    """What `Done` said."""

    @property
    def prompt(self) -> str:
        return "\n".join(message.content for message in self.observations[0].messages)


class Visitor:
    """Calls one environment, and tells what is wrong."""

    def __init__(
        self, tell: Tells, config: Config, entry: EnvironmentConfig, environment: Environment, chat: Chat
    ) -> None:
        self._tell, self._config, self._entry = tell, config, entry
        self._environment, self._chat = environment, chat
        self._deadline_s = config.producer.reward_deadline_s
        self._calls = Calls(self._deadline_s)
        self._clock = Clock()
        self._rewards: set[float] = set()
        self._turns: set[int] = set()
        self._tokens: set[int] = set()
        self._told: set[str] = set()
        self._failed = False
        """A call that must not fail has."""

    async def visit_all(self, train: int, held_out: int) -> None:
        watch = asyncio.create_task(self._clock.watch())
        try:
            for split, index in _places(train, held_out):
                await self._visit_place(split, index)
            if held_out and not self._failed:
                await self._overlap(train, held_out)
        finally:
            watch.cancel()
        self._judge_blocking()
        self._judge_template()
        self._sum_up()

    def _found(self, level: str, sentence: str) -> None:
        """What is wrong with several prompts is told of the first."""
        kind = _NUMBERS.sub("", sentence)
        if kind not in self._told:
            self._told.add(kind)
            self._tell.found(level, sentence)

    async def _visit_place(self, split: str, index: int) -> None:
        """The same episode twice, then with its answer, and with silence."""
        where = f"{split} prompt {index}"
        first = await self._visit(split, index, ANSWERS)
        second = await self._visit(split, index, ANSWERS) if first is not None else None
        if first is None or second is None:
            return
        if split == "train" and index == 0:
            self._tell.facts(**{"first prompt": shortened(first.prompt)})
        if first.observations != second.observations or not _same(first.answer, second.answer):
            self._found(
                "warning",
                f"{where} is another one when it is made again with the same seed; members of a group would play "
                f"different episodes: draw from random.Random(seed) in `episode`, and keep state in the episode alone",
            )
        self._judge_length(where, first)
        others = [await self._visit(split, index, (answer,)) for answer in (str(first.answer), "")]
        for visit in (first, *others):
            if visit is not None:
                await self._judge_reward(where, split, index, visit)

    async def _visit(self, split: str, index: int, answers: Sequence[str]) -> Visit | None:
        """None when it could not be played to its end; why was told."""
        where = f"{split} prompt {index}"
        seed = 1000 + index
        try:
            episode = await self._call(where, "episode", lambda: self._environment.episode(split, index, seed))
        except RolloutFailed:
            return None
        missing = [name for name in EPISODE if not callable(getattr(episode, name, None))]
        missing += [] if hasattr(type(episode), "answer") or hasattr(episode, "answer") else ["answer"]
        if missing:
            self._failed = True
            self._found(
                "error", f"its episodes ({type(episode).__name__}) have no {', '.join(missing)}; give them these"
            )
            return None
        try:
            return await self._play(where, episode, answers)
        except RolloutFailed:
            return None
        finally:
            with suppress(RolloutFailed):  # told
                await self._call(where, "close", episode.close)

    async def _play(self, where: str, episode: Any, answers: Sequence[str]) -> Visit:
        seen = [await self._call(where, "reset", episode.reset, lambda given: checked_observation(given, first=True))]
        turns: list[Turn] = []
        most = self._entry.max_turns or MOST_TURNS
        reward: float | None = None
        while len(turns) < most:
            turns.append(Turn(answers[len(turns) % len(answers)], "stop"))
            answer = await self._call(where, "step", lambda: episode.step(turns[-1]), checked_answer)
            if isinstance(answer, Done):
                reward = answer.reward
                break
            seen.append(answer)
            turns[-1] = replace(turns[-1], reward=float(answer.reward))
        else:
            if not self._entry.max_turns:
                self._found(
                    "error",
                    f"an episode of {where} has not ended after {most} turns, and would go on until the context is "
                    f"full; let `step` return Done at some time, or set max_turns of the environment",
                )
        self._turns.add(len(turns))
        return Visit(seen, turns, await self._call(where, "answer", lambda: episode.answer), reward)

    async def _call(
        self, where: str, method: str, call: Callable[[], Any], check: Callable[[object], Any] = lambda given: given
    ) -> Any:
        """Raises RolloutFailed, which was told."""
        what = f"{method} of {where}"
        self._tell.at(what, self._deadline_s)
        try:
            return check(await self._clock.time(method, lambda: self._calls.ask(what, call)))
        except RolloutFailed as failed:
            self._failed = True
            way = next((way for begin, way in WAYS_OUT.items() if str(failed).startswith(begin)), "")
            self._found("error", f"{what}: {failed}" + (f"; {way}" if way else ""))
            raise

    async def _judge_reward(self, where: str, split: str, index: int, visit: Visit) -> None:
        rollout = Rollout(
            environment=self._entry.called,
            index=index,
            prompt=visit.prompt,
            completion=visit.turns[-1].text,
            turns=tuple(visit.turns),
            answer=visit.answer,
            finish_reason="stop",
            given=visit.reward,
        )
        try:
            pickle.dumps(rollout)
        except Exception as error:  # noqa: BLE001 - a user's own __reduce__ raises what it likes
            self._found(
                "error",
                f"the answer of {where} cannot be pickled ({reason(error)}), and so cannot be sent to the processes "
                f"that score; keep plain data in `answer`",
            )
            return
        try:
            verdict = await self._call(where, "correct", lambda: self._environment.correct(rollout))
            if verdict not in (True, False):
                self._found("warning", f"correct of {where} gave {type(verdict).__name__}; return True or False")
            if visit.reward is not None:
                self._judge_number(where, "Done", visit.reward, visit)
                return
            once, again = [await self._call(where, "score", lambda: self._environment.score(rollout)) for _ in "12"]
        except RolloutFailed:
            return
        if self._judge_number(where, "score", once, visit) and once != again:
            self._found(
                "warning",
                f"score of {where} gave {once!r}, then {again!r} for the same rollout; what is learned from such a "
                f"reward is its noise, too",
            )

    def _judge_number(self, where: str, what: str, value: object, visit: Visit) -> bool:
        score = judged(value)
        if score.failure:
            self._found("error", f"{what} of {where}: {score.failure}; return a finite float")
            return False
        self._rewards.add(score.reward + sum(seen.reward for seen in visit.observations))
        return True

    def _judge_length(self, where: str, visit: Visit) -> None:
        first, context = visit.observations[0], self._config.model.context_length
        if len(visit.prompt) > LETTERS * context:
            self._found(
                "error",
                f"{where} has {len(visit.prompt)} letters, which leave no room for an answer in model.context_length = "
                f"{context}; make prompts shorter",
            )
            return
        try:
            tokens = len(self._chat.prompt(first.messages, first.tools))
        except ModelError as error:
            self._found("error", f"{where}: {error}; use roles that the template knows")
            return
        self._tokens.add(tokens)
        if tokens >= context:
            self._found(
                "error",
                f"{where} has {tokens} tokens, which leave no room for an answer in model.context_length = {context}; "
                f"raise that, or make prompts shorter",
            )
        elif tokens + self._config.sampling.max_new_tokens > context:
            self._found(
                "warning",
                f"{where} has {tokens} tokens and leaves room for {context - tokens} of sampling.max_new_tokens = "
                f"{self._config.sampling.max_new_tokens} in model.context_length = {context}",
            )

    async def _overlap(self, train: int, held_out: int) -> None:
        """Held-out prompts that are trained on measure nothing."""
        until = time.monotonic() + OVERLAP_S
        trained = {prompt: index async for index, prompt in self._prompts("train", train, until - OVERLAP_S / 2)}
        both = [(index, trained[p]) async for index, p in self._prompts("eval", held_out, until) if p in trained]
        if both:
            self._found(
                "error",
                f"{len(both)} held-out prompts are training prompts, too (eval {both[0][0]} is train {both[0][1]}), so "
                f"that an evaluation shows what was learned by heart; the splits must share none",
            )

    async def _prompts(self, split: str, size: int, until: float) -> Any:
        """(index, prompt) of as many as there is time for, spread over the split."""
        for index in range(0, size, max(1, size // MOST_PROMPTS)):
            if time.monotonic() > until:
                return
            self._tell.at(f"reset of {split} prompt {index}", self._deadline_s)
            try:
                episode = await self._calls.ask("episode", lambda: self._environment.episode(split, index, 0))  # noqa: B023
                shown = checked_observation(await self._calls.ask("reset", episode.reset), first=True)
                await self._calls.ask("close", episode.close)
            except RolloutFailed as failed:
                self._found("error", f"{split} prompt {index}: {failed}")
                return
            yield index, "\n".join(f"{message.role}: {message.content}" for message in shown.messages)

    def _judge_blocking(self) -> None:
        for method, seconds in self._clock.blocked.items():
            if method in ("score", "correct") or min(seconds) < BLOCKS_S:
                continue
            way = "do such work in `reset`, a coroutine" if method == "episode" else "make it a coroutine"
            self._found(
                "error",
                f"{method} blocks the event loop for {min(seconds):.2g} s at each call, in which no other rollout of "
                f"the producer goes on; {way} that awaits, as with asyncio.to_thread",
            )

    def _judge_template(self) -> None:
        if isinstance(self._chat, TemplateChat) and max(self._turns, default=0) > 1 and (why := difference(self._chat)):
            self._found(
                "warning",
                f"the model's chat template does not round-trip: {why}; the model then sees conversations of another "
                f"form than those that it was trained on",
            )

    def _sum_up(self) -> None:
        rewards = ", ".join(f"{reward:.3g}" for reward in sorted(self._rewards)[:8])
        seconds = {method: sum(took) / len(took) for method, took in self._clock.took.items()}
        self._tell.facts(
            **{
                "prompt tokens": _range(self._tokens),
                "turns": _range(self._turns),
                "rewards seen": rewards or "none",
                "seconds a call": ", ".join(f"{method} {mean:.2g}" for method, mean in seconds.items()),
            }
        )


def _places(train: int, held_out: int) -> Iterator[tuple[str, int]]:
    yield from (("train", index) for index in sorted({0, train // 2, train - 1}))
    yield from (("eval", index) for index in sorted({0, held_out // 2, held_out - 1}) if held_out)


def _same(one: Any, other: Any) -> bool:
    """By value where both can be written; arrays and the like have no single truth."""
    try:
        # A dataclass may say what of it counts.
        return pickle.dumps(one) == pickle.dumps(other) or (is_dataclass(one) and bool(one == other))
    except Exception:  # noqa: BLE001 - told elsewhere
        return True


def _range(numbers: set[int]) -> str:
    if not numbers:
        return "none"
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"
