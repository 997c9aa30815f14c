"""What a producer tells about itself: two lanes, counters and figures per heartbeat."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from broker.api import Published
from broker.messages import Group
from headrace.telemetry.clock import now, process_began
from headrace.telemetry.journal import Journal, LossyJournal
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.phases import IDLE_PREFIX, Lane, idle_fraction
from headrace.telemetry.recorder import Recorder, so_far
from producers.engines.api import Engine, EngineStats
from producers.rewards.worker import Score
from weightsync.commits import Commit
from weightsync.transports import KINDS

GROUP_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
SAMPLING = ("prefill", "decode", "recompute")
"""Phases in which an engine samples."""
MOST_REASONS = 16
"""Different reasons for failures in one line of the journal."""
REWARDS = (-1, -0.5, 0, 0.1, 0.25, 0.5, 0.75, 0.9, 1, 2)
TOKENS = {
    "decoded_tokens": "Tokens sampled by the engine",
    "prefill_tokens": "Prompt tokens computed by the engine",
    "recomputed_tokens": "Tokens whose keys and values the engine computed again after a commit",
}
"""Of `EngineStats`."""


class Gauges:
    """Counters of one producer. Lane "engine" is the decode loop's; lane "host" says what the whole waits for.

    Without a journal, heartbeats carry what its lanes did.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        journal: Journal | None,
        recorder: Recorder | None = None,
        scoring: Iterable[Lane] = (),
    ) -> None:
        """`recorder` writes into the same journal, and has the engine's lane already. `scoring`: the scorer's lanes."""
        self.host = Lane("host", "wait_start")
        self.host.backdate(process_began())
        self._engine = engine
        engine_lane = getattr(engine, "lane", None)
        # An engine of one's own need not have a lane.
        self._engine_lane = engine_lane if isinstance(engine_lane, Lane) else None
        self._metrics = metrics
        self._journal = LossyJournal(journal, metrics, "rollouts go on")
        self._lanes = tuple(lane for lane in (self._engine_lane, self.host, *scoring) if lane is not None)
        metrics.watch(*self._lanes)
        self._recorded = recorder is not None
        if recorder is not None:
            for lane in self._lanes:
                recorder.add(lane)
        self._read_at = time.monotonic()
        self._read_stats = engine.stats()
        self._read_lane = self._busiest().seconds()
        self.taken = self.published = self.failed_rollouts = 0
        self.without_device = False
        """The engine is asked for tokens, and others have its device."""
        self._transport = ""
        self._away_since: float | None = None
        self._away_from = 0.0
        self._troubles: list[dict[str, Any]] = []
        """Why it waits, for `headrace status`: what keeps a producer alive works while Redis is full."""

    def does(self, phase: str) -> None:
        """What the producer as a whole does now, and so what its engine waits for when it has nothing to do."""
        if phase == "play" and self.without_device:
            phase = "wait_device"
        if phase != self.host.phase:
            self.host.enter(phase)
        if self._engine_lane is not None:
            self._engine_lane.because("environment" if phase == "play" else phase.removeprefix(IDLE_PREFIX))

    def took(self, tasks: int) -> None:
        self.taken += tasks
        self._metrics.count("tasks_taken", tasks, help="Tasks that this producer took")

    def lost(self, tokens: int, task: str) -> None:
        """A task was taken over from this producer, which had sampled so many tokens for it."""
        self._metrics.count("tasks_lost", help="Tasks that were taken over from this producer")
        self.thrown_away("lost", tokens, task)

    def thrown_away(self, reason: str, tokens: int, task: str) -> None:
        self._metrics.count("tokens_thrown_away", tokens, help="Sampled tokens that nobody trains on", reason=reason)
        if tokens:
            self.event("wasted", reason=reason, tokens=tokens, task=task, device_s=self._device_s(tokens))

    def outage(self, why: str) -> None:
        """The broker keeps this producer waiting, with why, or answers again."""
        moment = time.monotonic()
        if self._away_since is not None:
            self._metrics.count(
                "outage_seconds", moment - self._away_since, help="Seconds in which the broker was away"
            )
        if why and self._away_since is None:
            self.event("outage", why=why)
        elif not why and self._away_since is not None:
            self.event("outage_over", seconds=round(moment - self._away_from, 3))
        if why and self._away_since is None:
            self._away_from = moment
        since = self._troubles[0]["since"] if self._troubles else round(time.time(), 1)
        self._troubles = [{"kind": "broker", "reason": why, "since": since}] if why else []
        self._away_since = moment if why else None
        self._metrics.gauge("outage", bool(why), help="1 while the broker keeps this producer waiting")

    def committed(self, commit: Commit, *, again: bool = False) -> None:
        """A version is in the engine; `again`, for an evaluation or after it, which says nothing of latency."""
        self.event("visit" if again else "swap", **swap_fields(commit))
        self._metrics.count("weight_commits", help="Policy versions committed")
        self._metrics.count(
            "weight_commit_seconds", commit.commit_s, help="Seconds that decoding stood still for commits"
        )
        if again:
            return
        self._metrics.gauge(
            "weight_latency_seconds", commit.latency_s, help="From the newest version's seal to its commit"
        )

    def transport(self, kind: str) -> None:
        """How weights come here, from now on."""
        self._transport = kind
        self.event("transport", kind=kind)
        for known in KINDS:
            self._metrics.gauge("weight_transport", known == kind, help="1 for how weights come here", kind=known)

    def published_group(self, group: Group, answer: Published, sampled: int, at: Mapping[str, float]) -> None:
        """Count one group that the broker answered; `sampled` tokens were spent on it, `at` says when it came where."""
        self.published += 1
        self.failed_rollouts += len(group.failures)
        outcome = group.outcome if answer != "superseded" and group.outcome != "played" else answer
        waste = wasted(group, answer, sampled)
        self.thrown_away(outcome if outcome in ("stale", "superseded") else "failed", waste, group.task_id)
        if group.outcome == "stale":
            self._metrics.count("groups_stopped", help="Groups that were stopped as stragglers")
            self._metrics.count("rollouts_stopped", len(group.stopped_N), help="Rollouts of groups that were stopped")
        self._metrics.count("groups", help="Groups by kind and outcome", kind=group.kind, outcome=outcome)
        self._metrics.count("rollouts_failed", len(group.failures), help="Rollouts that ended without a sample")
        for stage, seconds in group.seconds.items():
            self._metrics.observe(
                "group_seconds", seconds, buckets=GROUP_SECONDS, help="Slowest member of a group", stage=stage
            )
        for trajectory in group.trajectories:
            self._metrics.observe(
                "reward", trajectory.reward, buckets=REWARDS, help="Rewards of rollouts", kind=group.kind
            )
        self._write(group, outcome, sampled - waste, {**at, "published": now()})

    def scored(self, environment: str, score: Score) -> None:
        """What the parts of a weighted sum gave to one rollout, before they were weighted."""
        for part, value in score.parts.items():
            self._metrics.observe(
                "reward_part",
                value,
                buckets=REWARDS,
                help="Parts of rewards, unweighted",
                environment=environment,
                part=part,
            )

    def backlog(self, environment: str, unscored: int, held_back: int) -> None:
        """Groups of an environment that wait for scores, and those that wait for these."""
        self._metrics.gauge("groups_unscored", unscored, help="Decoded groups without scores", environment=environment)
        self._metrics.gauge(
            "groups_held_back",
            held_back,
            help="Groups that do not begin because their environment's scores are behind",
            environment=environment,
        )

    def heartbeat(self, event_loop_lag_s: float, metrics_url: str) -> dict[str, Any]:
        """Figures since the last heartbeat, also set as gauges."""
        moment, stats, lane = time.monotonic(), self._engine.stats(), self._busiest().seconds()
        figures: dict[str, Any] = {
            "version": str(self._engine.version or ""),
            "phase": self.host.phase,
            **{name: getattr(stats, name) for name in TOKENS},
            "tokens_per_s": rate(stats.decoded_tokens - self._read_stats.decoded_tokens, moment - self._read_at),
            "occupancy": occupancy(stats, self._read_stats),
            "idle": round(idle_fraction(lane, self._read_lane), 4),
            "slots": stats.slots,
            "busy_slots": stats.busy_slots,
            "waiting": stats.waiting,
            "taken": self.taken,
            "published": self.published,
            "failed_rollouts": self.failed_rollouts,
            "transport": self._transport,
            "event_loop_lag_s": round(event_loop_lag_s, 4),
        }
        for name, what in TOKENS.items():
            self._metrics.count(name, getattr(stats, name) - getattr(self._read_stats, name), help=what)
        self._read_at, self._read_stats, self._read_lane = moment, stats, lane
        for name in ("tokens_per_s", "occupancy", "idle", "slots", "busy_slots", "waiting"):
            self._metrics.gauge(name, figures[name])
        if self._engine.version is not None:
            self._metrics.gauge("version_step", self._engine.version.step, help="Step of the version it samples from")
        self._metrics.gauge("event_loop_lag_seconds", event_loop_lag_s, help="How late the event loop woke up last")
        self.event("state", **figures)
        seconds_of_lane = {phase: round(seconds, 3) for phase, seconds in lane.items()}
        troubles = [*self._troubles, *self._journal.troubles()]
        said = {**figures, "seconds": seconds_of_lane, "metrics_url": metrics_url, "troubles": troubles}
        return said if self._recorded else {**said, "lanes": so_far(self._lanes)}

    def event(self, event: str, **fields: Any) -> None:
        """One line in the journal, where there is one. A disk that is full ends no rollout."""
        self._journal.write(event, **fields)

    def close(self) -> None:
        self._journal.close()

    def _busiest(self) -> Lane:
        return self._engine_lane or self.host

    def _device_s(self, tokens: int) -> float:
        """What so many sampled tokens took of the engine's devices, by what all took so far."""
        lane, sampled = self._engine_lane, self._engine.stats().decoded_tokens
        if lane is None or not sampled:
            return 0.0
        seconds = lane.seconds()
        spent = sum(seconds.get(phase, 0.0) for phase in SAMPLING) * lane.place.devices
        return round(spent / sampled * tokens, 6)

    def _write(self, group: Group, outcome: str, kept: int, at: Mapping[str, float]) -> None:
        rewards = [round(trajectory.reward, 4) for trajectory in group.trajectories]
        self.event(
            "group",
            task=group.task_id,
            attempt=group.attempt,
            kind=group.kind,
            outcome=outcome,
            rewards=rewards,
            tokens=sampled_tokens(group),
            device_s=self._device_s(kept),
            at=at,
            failures=dict(Counter(group.failures).most_common(MOST_REASONS)),
            stopped=list(group.stopped_N),
            seconds={stage: round(seconds, 3) for stage, seconds in group.seconds.items()},
        )


def swap_fields(commit: Commit) -> dict[str, Any]:
    """A commit as the journal has it."""
    return {
        "version": str(commit.version),
        "nbytes": commit.nbytes,
        "sealed": round(commit.sealed_at, 6),
        "arrived": commit.arrived_at,
        "verified": commit.verified_at,
        "begin": round(commit.ended_at - commit.commit_s, 6),
        "end": commit.ended_at,
        "latency_s": round(commit.latency_s, 6),
    }


def sampled_tokens(group: Group) -> int:
    return sum(int(trajectory.loss_mask_T.sum()) for trajectory in group.trajectories)


def wasted(group: Group, answer: Published, sampled: int) -> int:
    """Of the tokens sampled for a group, those that nobody can train on: failed members', or all."""
    return sampled if answer == "superseded" else sampled - sampled_tokens(group)


def rate(amount: float, seconds: float) -> float:
    return round(amount / seconds, 1) if seconds > 0 else 0.0


def occupancy(stats: EngineStats, before: EngineStats) -> float:
    """Share of slots that held a sequence, over the decode steps between two readings; 0 without a step."""
    steps = stats.decode_steps - before.decode_steps
    return round((stats.busy_slot_steps - before.busy_slot_steps) / (steps * stats.slots), 4) if steps else 0.0


def journal_of(folder: str, name: str) -> Journal | None:
    """The producer's journal in the run's folder, where that is on this machine. Raises ServiceError."""
    return Journal(Path(folder) / f"{name}.jsonl") if folder and Path(folder).is_dir() else None
