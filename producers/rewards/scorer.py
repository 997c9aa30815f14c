"""Scoring beside decoding: every reward of a run, in workers and at services of each environment's own."""

from __future__ import annotations

import asyncio
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace

from broker.messages import TaskKind
from headrace.config import OWN_REWARD, EnvironmentConfig, RewardConfig
from headrace.objects import reason
from headrace.telemetry.phases import Lane
from producers.environments.api import Rollout
from producers.rewards.pool import Pool
from producers.rewards.registry import parts_of
from producers.rewards.service import Service
from producers.rewards.worker import Call, Score, judged

LOADING = 4
"""Environments whose workers are loaded at once as a producer starts."""


class Bench:
    """What scores one environment: its workers, its services, and the summands of its reward."""

    def __init__(self, environment: EnvironmentConfig, *, workers: int, deadline_s: float, memory_mb: int) -> None:
        self.parts = parts_of(environment)
        self.pool = Pool(environment, workers=workers, deadline_s=deadline_s, memory_mb=memory_mb)
        # Where it is not named, what an episode gave by itself never comes here.
        named = (place for place, part in enumerate(environment.reward) if part.name == OWN_REWARD)
        self._own = next(named, -1)
        self._services = {
            place: Service(part, deadline_s, f"{environment.called}/service-{place}")
            for place, part in enumerate(self.parts)
            if part.is_service
        }

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """One per worker and per request to a service."""
        return (*self.pool.lanes, *(lane for service in self._services.values() for lane in service.lanes))

    async def score(self, kind: TaskKind, rollout: Rollout, pickled: bytes) -> Score:
        """All parts at once but those of the group, and the environment's verdict with the first worker's call."""
        places = [place for place, part in enumerate(self.parts) if not part.group]
        known = {self._own} if rollout.given is not None else set()
        functions: list[int | None] = [place for place in places if place not in self._services.keys() | known]
        # Without a function a worker is asked for the verdict alone.
        functions = functions or [None]

        async def ask(place: int | None) -> Score:
            if place in self._services:
                return await self._services[place].score(rollout)
            if place in known:
                return judged(rollout.given)
            call = Call(kind, place, place == functions[0], False, 1, pickled)
            return (await self.pool.call(call))[0]

        asked = sorted({*places, *functions}, key=lambda place: -1 if place is None else place)
        scores = dict(zip(asked, await asyncio.gather(*map(ask, asked)), strict=True))
        if self._own in scores and not scores[self._own].failure:
            turns = sum(turn.reward for turn in rollout.turns)
            scores[self._own] = replace(scores[self._own], reward=scores[self._own].reward + turns)
        return combined(self.parts, scores)

    async def score_group(self, pickled: bytes, count: int) -> list[Score]:
        """The parts of the group, for each of its `count` members."""
        places = [place for place, part in enumerate(self.parts) if part.group]
        calls = (self.pool.call(Call("train", place, False, True, count, pickled)) for place in places)
        columns = await asyncio.gather(*calls)
        return [combined(self.parts, dict(zip(places, scores, strict=True))) for scores in zip(*columns, strict=True)]

    async def close(self) -> None:
        await asyncio.gather(self.pool.close(), *(service.close() for service in self._services.values()))


class Scorer:
    """The rewards of all environments. Environments share nothing, so that none waits for another one's reward.

    A call is a Score with a reason instead of a reward when the reward raises, is silent past `deadline_s`, takes its
    process down, holds more than `memory_mb`, or when its service has no good answer within `deadline_s`.
    """

    def __init__(
        self, environments: Mapping[str, EnvironmentConfig], *, workers: int, deadline_s: float, memory_mb: int = 4096
    ) -> None:
        self._benches = {
            name: Bench(environment, workers=workers, deadline_s=deadline_s, memory_mb=memory_mb)
            for name, environment in environments.items()
        }
        self._open = 0
        self._starting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the workers now, so that they are ready when the first rollout ends."""
        self._starting = asyncio.create_task(self._start())

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Of all environments: what scores them is busy or waits."""
        return tuple(lane for bench in self._benches.values() for lane in bench.lanes)

    @property
    def open_calls(self) -> int:
        return self._open

    async def score(self, name: str, kind: TaskKind, rollout: Rollout) -> Score:
        """The reward of a finished rollout of environment `name`; of an evaluation 1 for right and 0 for wrong.

        What is relative to the rest of its group is left out: that is for `score_group`.
        """
        bench = self._benches[name]
        if isinstance(pickled := _pickled([rollout]), Score):
            return pickled
        self._open += 1
        try:
            if kind == "eval":
                return (await bench.pool.call(Call(kind, None, True, False, 1, pickled)))[0]
            return await bench.score(kind, rollout, pickled)
        finally:
            self._open -= 1

    async def score_group(self, name: str, rollouts: Sequence[Rollout]) -> list[Score]:
        """What the rollouts of a group get relative to each other; without the rewards of each by itself."""
        bench = self._benches[name]
        if isinstance(pickled := _pickled(list(rollouts)), Score):
            return [pickled] * len(rollouts)
        self._open += 1
        try:
            return await bench.score_group(pickled, len(rollouts))
        finally:
            self._open -= 1

    async def close(self) -> None:
        """End all processes and connections. Calls that are open end as failures. Idempotent."""
        await asyncio.gather(*(bench.close() for bench in self._benches.values()))
        if self._starting is not None:
            await self._starting

    async def _start(self) -> None:
        seats = asyncio.Semaphore(LOADING)

        async def start(pool: Pool) -> None:
            async with seats:
                await pool.start()

        await asyncio.gather(*(start(bench.pool) for bench in self._benches.values()))


def combined(parts: Sequence[RewardConfig], scores: Mapping[int | None, Score]) -> Score:
    """The weighted sum of the scores of some parts, by their places; what fails in one fails the sum, with its name.

    The score of None is no summand: it only says whether the rollout is correct.
    """
    correct = next((score.correct for score in scores.values() if score.correct is not None), None)
    values: dict[str, float] = {}
    total = 0.0
    for place, score in scores.items():
        name = "" if place is None else parts[place].name
        if score.failure:
            return Score(failure=_named(score.failure, name) if len(parts) > 1 else score.failure, correct=correct)
        if place is not None:
            values[name] = score.reward
            total += parts[place].weight * score.reward
    if not math.isfinite(total):
        return Score(failure=f"reward is {total}, not a finite number", correct=correct)
    return Score(total, correct=correct, parts=values if len(parts) > 1 else {})


def _named(failure: str, name: str) -> str:
    told = failure.removeprefix("reward ")
    return failure if not name or told == failure or repr(name) in failure else f"reward {name!r} {told}"


def _pickled(rollouts: list[Rollout]) -> bytes | Score:
    try:
        return pickle.dumps(rollouts)
    except Exception as error:  # noqa: BLE001 - a user's own __reduce__ raises what it likes
        return Score(failure=f"the rollout cannot be sent to its reward ({reason(error)})")
