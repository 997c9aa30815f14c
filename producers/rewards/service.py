"""A reward-model service, asked over HTTP beside decoding: in batches, with retries, within a deadline.

Wait graph: a rollout waits in `_waiting` until one of `requests` senders takes it, then for that sender's answer, which
comes within the deadline. Senders end when nothing waits, and a new rollout starts one; no timer collects batches:
while all senders are under way the others gather, so that a single rollout is sent at once.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import aiohttp

from headrace.config import RewardConfig
from headrace.errors import ConfigError
from headrace.objects import reason, shortened
from headrace.secret import secret
from headrace.telemetry.phases import Lane
from producers.environments.api import Rollout
from producers.rewards.formats import BadAnswer, encoded, request, values_of
from producers.rewards.worker import Score, judged

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Before a request is sent again: doubled each time, and a random part of it left out."""
LARGEST_ANSWER = 16 << 20
"""Bytes."""


PASSING = (408, 425, 429)
"""Statuses below 500 that may be another one the next time."""
ENDED = Score(failure="reward was not reached: the producer ends")


class _Refused(Exception):
    """What will be the same the next time. Its text is what happened."""


class _Again(Exception):
    """What may be better the next time. Its text is what happened."""


@dataclass(slots=True, eq=False)
class _Waiting:
    item: str
    score: asyncio.Future[Score]


class Service:
    """One service for one environment."""

    def __init__(self, config: RewardConfig, deadline_s: float, name: str = "service") -> None:
        """`name`: of its lanes, one per request at once.

        Raises ConfigError where the variable with its token is not set.
        """
        self._config, self._deadline_s = config, deadline_s
        lanes = (
            Lane(f"score/{name}/{number}", "wait_rollout", waits_for="rollout") for number in range(config.requests)
        )
        self.lanes = tuple(lanes)
        self._free = list(self.lanes)
        self._token = _token(config.token_env)
        self._waiting: deque[_Waiting] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None

    async def score(self, rollout: Rollout) -> Score:
        """Its reward, or a failure with the reason. `deadline_s` counts from when its batch is first sent."""
        try:
            item = encoded(self._config, rollout)
        except (TypeError, ValueError) as error:
            return Score(failure=f"reward cannot be asked: the rollout is not JSON ({reason(error)})")
        waiting = _Waiting(item, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if len(self._senders) < self._config.requests:
            self._senders.add(asyncio.create_task(self._send()))
        # Cancelled with its rollout, it is left out of the next batch.
        return await waiting.score

    async def close(self) -> None:
        """Open calls end as failures. Idempotent."""
        senders = list(self._senders)
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
        _settle(self._waiting, [ENDED] * len(self._waiting))
        self._waiting.clear()
        if self._session is not None:
            await self._session.close()

    async def _send(self) -> None:
        lane = self._free.pop()
        lane.enter("score")
        try:
            while batch := self._batch():
                scores = [ENDED] * len(batch)
                try:
                    scores = await self._asked([waiting.item for waiting in batch])
                finally:
                    _settle(batch, scores)
        finally:
            lane.wait()
            self._free.append(lane)
            # At once, not when its task is seen to have ended: what comes in between must find a sender missing.
            self._senders.discard(asyncio.current_task())

    def _batch(self) -> list[_Waiting]:
        """What is sent next; rollouts that were cut are not."""
        batch: list[_Waiting] = []
        while self._waiting and len(batch) < self._config.batch:
            waiting = self._waiting.popleft()
            if not waiting.score.done():
                batch.append(waiting)
        return batch

    async def _asked(self, items: Sequence[str]) -> list[Score]:
        last = ""
        try:
            async with asyncio.timeout(self._deadline_s):
                for attempt in itertools.count():
                    try:
                        answer = await self._post(request(self._config, items))
                        return [judged(value) for value in values_of(self._config, answer, len(items))]
                    except _Again as again:
                        last = f"; last, the service {again}"
                        await asyncio.sleep(pause_s(attempt))
        except TimeoutError:
            return [Score(failure=f"reward took longer than {self._deadline_s:g} s{last}")] * len(items)
        except _Refused as refused:
            if len(items) > 1:
                # Perhaps one of them alone is at fault.
                alone = await asyncio.gather(*(self._asked([item]) for item in items))
                return [score for (score,) in alone]
            return [Score(failure=f"reward was refused: the service {refused}")]
        except BadAnswer as error:
            return [Score(failure=f"reward cannot be read: the service {error}")] * len(items)
        raise AssertionError("attempts never end by themselves")

    async def _post(self, body: bytes) -> bytes:
        """The body of a good answer. Raises _Again, _Refused or BadAnswer."""
        try:
            async with self._opened().post(self._config.name, data=body, allow_redirects=False) as response:
                answer = await _body(response)
        except ValueError as error:
            # A token that no header can hold.
            raise _Refused(f"cannot be asked ({reason(error)})") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Again(f"did not answer ({reason(error)})") from error
        if response.status == 200:
            return answer
        text = " ".join(answer.decode(errors="replace").split())
        said = f"answered {response.status} {response.reason}" + (f" ({shortened(text)})" if text else "")
        raise _Again(said) if response.status >= 500 or response.status in PASSING else _Refused(said)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"Content-Type": "application/json"}
            if self._token:
                headers["Authorization"] = f"Bearer {self._token}"
            # Its own limits are off: the deadline is set where the request is made.
            # Also rollouts that are asked for one by one are so many at once, and no more.
            self._session = aiohttp.ClientSession(
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=self._config.requests),
            )
        return self._session


def _token(variable: str) -> str:
    token = secret(variable, os.environ).strip() if variable else ""
    if variable and not token:
        raise ConfigError(f"reward.token_env = {variable!r}: this variable is not set, nor is {variable}_FILE")
    return token


def pause_s(attempt: int) -> float:
    """Seconds before the next attempt after `attempt` (from 0): at random in the upper half of a time that doubles."""
    longest_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * float(1 << min(attempt, 16)))
    return longest_s * random.uniform(0.5, 1.0)


def _settle(batch: Iterable[_Waiting], scores: Iterable[Score]) -> None:
    for waiting, score in zip(batch, scores, strict=True):
        if not waiting.score.done():
            waiting.score.set_result(score)


async def _body(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for part in response.content.iter_chunked(1 << 16):
        body += part
        if len(body) > LARGEST_ANSWER:
            raise BadAnswer(f"answered more than {LARGEST_ANSWER} bytes")
    return bytes(body)
