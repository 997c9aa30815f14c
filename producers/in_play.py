"""One task in play: where each of its members is, what they have sampled, and how they are ended early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from broker.messages import Trajectory
from headrace.telemetry.clock import now
from headrace.version import PolicyVersion
from producers.engines.api import Engine, Progress, TellsProgress
from producers.transcript import Transcript


@dataclass(frozen=True, slots=True)
class Member:
    """What became of one member: a trajectory, or the reason why there is none."""

    trajectory: Trajectory | None
    failure: str = ""
    queue_s: float = 0.0
    decode_s: float = 0.0
    score_s: float = 0.0


@dataclass(slots=True, eq=False)
class Seat:
    """The place of one member."""

    transcript: Transcript = field(default_factory=Transcript)
    at: Literal["play", "score", "end"] = "play"
    member: Member | None = None
    """Once it has ended, or was ended."""
    call: asyncio.Task[None] | None = None

    def progress(self, engine: Engine) -> Progress:
        """What is in the transcript, and in the request whose completion comes next where the engine tells of it."""
        oldest, sampled = self.transcript.oldest, self.transcript.sampled
        if self.transcript.request_id and isinstance(engine, TellsProgress):
            coming = engine.progress(self.transcript.request_id) or Progress(0)
            return Progress(sampled + coming.sampled, oldest or coming.oldest)
        return Progress(sampled, oldest)


class InPlay:
    """The seats of one task. All count as playing from the start; `moved` is called whenever a member moves on."""

    def __init__(self, size: int, moved: Callable[[], None] = lambda: None) -> None:
        self.seats = tuple(Seat() for _ in range(size))
        self.playing, self.scoring = size, 0
        self.stale = ""
        """Why it was stopped as a straggler."""
        self.stopped_N: tuple[int, ...] = ()
        """Sampled tokens of each member at that moment."""
        self._moved = moved
        self._at = {"taken": now()}

    def begin(self) -> None:
        """There is a version that it may start on, and nothing holds it back."""
        self._at["begun"] = now()

    @property
    def at(self) -> dict[str, float]:
        """When it was taken, might begin, had its first token, was decoded and was scored, as far as it came. Seconds
        since the epoch.
        """
        first = min((seat.transcript.first_at for seat in self.seats if seat.transcript.first_at), default=None)
        return self._at if first is None else {**self._at, "first_token": first}

    def move(self, seat: Seat, to: Literal["score", "end"]) -> None:
        self.playing -= seat.at == "play"
        self.scoring += (to == "score") - (seat.at == "score")
        seat.at = to
        if not self.playing:
            self._at.setdefault("decoded", now())
            if not self.scoring:
                self._at.setdefault("scored", now())
        self._moved()

    def clear(self) -> None:
        """Nobody plays or is scored any more."""
        for seat in self.seats:
            self.move(seat, "end")

    def fail(self, why: str) -> None:
        """The task never begins."""
        for seat in self.seats:
            seat.member = Member(None, why)
        self.clear()

    def ends(self) -> list[Member]:
        """What became of each member; all have ended."""
        return [seat.member for seat in self.seats if seat.member is not None]

    def sampled(self, engine: Engine) -> int:
        """Tokens of all members so far."""
        return sum(seat.progress(engine).sampled for seat in self.seats)

    def oldest(self, engine: Engine) -> PolicyVersion | None:
        """The version of the oldest token that the group would have, as far as it is known; not of failed members."""
        seats = (seat for seat in self.seats if seat.member is None or seat.member.trajectory is not None)
        versions = [version for seat in seats if (version := seat.progress(engine).oldest) is not None]
        return min(versions, key=lambda version: version.step, default=None)

    def stop(self, why: str, engine: Engine) -> None:
        """End all members: nobody can use the group any more."""
        self.stale = why
        self.stopped_N = tuple(seat.progress(engine).sampled for seat in self.seats)
        for seat in self.seats:
            self._cut(seat, why, engine)

    def expire(self, engine: Engine) -> None:
        """Time is over: members that have not come to their end have failed."""
        for seat in self.seats:
            what = "was still being scored" if seat.at == "score" else "was still playing"
            self._cut(seat, f"the task's deadline passed: it {what}", engine)

    def _cut(self, seat: Seat, why: str, engine: Engine) -> None:
        if seat.member is not None:
            return
        seat.member = Member(None, why)
        # Now, because the engine forgets a request that is aborted.
        seat.transcript.lost += seat.progress(engine).sampled - seat.transcript.sampled
        if seat.call is not None:
            seat.call.cancel()
