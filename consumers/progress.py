"""Progress: what the trainer says about each step and about the whole run, as lines, metrics and the summary."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from broker.api import Balance, Peer
from broker.looks import QueueDepths
from broker.messages import Group, StepEntry, Task
from consumers.batch import Batch
from consumers.evaluation import Result, paired
from consumers.lag import histogram
from consumers.lines import Lines
from consumers.logs import Logs
from consumers.tally import Tally
from consumers.trainer import StepResult
from headrace.telemetry.arithmetic import Roofline
from headrace.telemetry.clock import now
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.phases import Lane, idle_fraction
from headrace.telemetry.recorder import Recorder

LAGS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
LANE_FIELDS = ("lane", "kind", "device", "devices", "shared", "estimated", "begin", "sums")
"""Of a lane in a heartbeat."""

Phases = dict[str, float]
"""Phase to seconds."""


class Progress:
    """Lane, metrics and journals of the trainer."""

    def __init__(
        self,
        folder: Path,
        lane: Lane,
        metrics: Metrics,
        incarnation: int,
        environments: Collection[str],
        external: Iterable[Lane] = (),
        logs: Logs | None = None,
    ) -> None:
        """Takes the journals over from earlier trainers. `external`: lanes of what the run holds. `logs`: for whom
        figures are besides.

        Raises ServiceError when the folder cannot be written.
        """
        external = tuple(external)
        self._logs = logs or Logs()
        self._steps = Lines(folder / "steps.jsonl", incarnation)
        self._events = Lines(folder / "trainer.jsonl", incarnation)
        self.newest = int(self._steps.last.get("step", 0))
        """The step of the last line, perhaps an earlier trainer's."""
        self._tally = Tally(metrics, environments)
        self._lane = lane
        self._metrics = metrics
        self._started = self._at = time.perf_counter()
        self._seconds = lane.seconds()
        self._warm: tuple[Phases, dict[str, Phases]] | None = None
        self._last: tuple[Phases, dict[str, Phases]] | None = None
        self._said = [0.0, 0.0]
        """Seconds of steps, and of them what producers said they were idle."""
        self._standing: dict[str, Any] = {}
        self.figures: dict[str, Any] = {"idle": 0.0, "tokens_per_s": 0.0}
        """Of the last step, for the heartbeat."""
        self._recorder = Recorder(self._events.journal.write, (lane, *external))
        self._elsewhere: dict[tuple[str, int, str], Any] = {}
        """What was written last of lanes on hosts that do not have the run's folder."""
        metrics.watch(lane, *external)

    def record(self) -> None:
        """Write from now on what the lanes do."""
        self._recorder.start()

    def begin(self, roofline: Roofline) -> None:
        """All is loaded: wall time and the time of the first step count from here. `roofline`: the lane's device's."""
        self._started = self._at = time.perf_counter()
        self._seconds = self._lane.seconds()
        self._recorder.add(self._lane, roofline)

    def event(self, event: str, **fields: Any) -> None:
        """One line in the trainer's journal, and a counter of its kind."""
        self.note(event, **fields)
        self._metrics.count("trainer_events", help="Events by kind", kind=event)

    def note(self, event: str, **fields: Any) -> None:
        """One line in the trainer's journal, of what happens all the time."""
        self._events.write(event, **fields)

    @property
    def trouble(self) -> str:
        """Why lines wait to be written; empty while none does."""
        return self._steps.trouble or self._events.trouble

    @property
    def logs_trouble(self) -> str:
        """Which experiment logs have failed; empty while none has."""
        return self._logs.trouble

    def flush(self) -> None:
        """Write the lines that wait, where there is room by now."""
        self._steps.flush()
        self._events.flush()

    def dropped(self, group: Group, entry: StepEntry) -> None:
        """A group that no step will use."""
        self._tally.count(group, entry.verdict)
        self.event(entry.verdict, task=entry.task_id, reason=entry.reason, samples=len(group.trajectories))

    def admitted(self, tasks: Iterable[Task]) -> None:
        """Tasks that producers may take from now on."""
        steps: dict[int, list[str]] = {}
        for task in tasks:
            steps.setdefault(task.admitted_step, []).append(task.task_id)
        for step, names in steps.items():
            self.note("admitted", at=now(), step=step, tasks=names)

    def trained(self, batch: Batch, result: StepResult, formed: float) -> None:
        """A batch that was formed at a time (seconds since the epoch) is trained on now, and not yet published."""
        self.note(
            "trained",
            step=batch.version.step,
            version=str(batch.version),
            tasks=[delivery.group.task_id for delivery in batch.deliveries],
            samples=result.rollouts,
            begin=formed,
            end=now(),
        )

    def elsewhere(self, peers: Iterable[Peer]) -> None:
        """Write what services say of their lanes that cannot write it themselves."""
        for peer in peers:
            for lane in lanes_of(peer):
                key = peer.name, peer.pid, str(lane["lane"])
                if self._elsewhere.get(key) != lane["sums"]:
                    self._elsewhere[key] = lane["sums"]
                    self.note("spans", service=peer.name, host=peer.host, pid=peer.pid, cumulative=True, **lane)

    def standing(self, retained_bytes: int, mended: int, lost: int, peers: Iterable[Peer]) -> None:
        """What the run holds and misses now, for the metrics and the next line."""
        producers = [peer.alive for peer in peers if peer.role == "producer"]
        self._standing = {
            "retained_bytes": retained_bytes,
            "mended": mended,
            "lost": lost,
            "producers": {"alive": sum(producers), "missing": len(producers) - sum(producers)},
        }
        for name, value, help_ in (
            ("trainer_retained_bytes", retained_bytes, "Groups that no checkpoint contains"),
            ("trainer_mended", mended, "How often Redis came back and was made whole"),
            ("trainer_lost", lost, "Tasks that Redis lost"),
            ("trainer_producers", sum(producers), "Producers that live"),
            ("trainer_producers_missing", len(producers) - sum(producers), "Producers that fell silent"),
        ):
            self._metrics.gauge(name, value, help=help_)

    def broker(self, balance: Iterable[Balance], depths: QueueDepths, used: int, limit: int) -> None:
        """The balance sheet, what waits, and the broker's memory in bytes (limit 0: none), for the metrics."""
        for sheet in balance:
            rows = {"admitted": sheet.admitted, "outstanding": sheet.outstanding, **sheet.verdicts}
            for row, tasks in rows.items():
                self._metrics.gauge("balance_tasks", tasks, help="Tasks by row of the sheet", kind=sheet.kind, row=row)
            self._metrics.gauge("balance_open", not sheet.closed, help="1: the rows do not add up", kind=sheet.kind)
        for queue, entries in asdict(depths).items():
            self._metrics.gauge("queue_entries", entries, help="Tasks, groups and dead letters", queue=queue)
        self._metrics.gauge("broker_memory_bytes", used, help="What Redis uses, for all its runs")
        self._metrics.gauge("broker_memory_limit_bytes", limit, help="Its maxmemory; 0 for none")

    def bounds(self, max_lag: int, retain_bytes: int) -> None:
        """What the configuration allows, beside which the metrics are read."""
        self._metrics.gauge("trainer_max_lag", max_lag, help="staleness.max_lag")
        self._metrics.gauge("trainer_retain_bytes", retain_bytes, help="broker.retain_bytes")

    def evaluated(self, shown: Mapping[str, Any]) -> None:
        """An evaluation has its result, as `consumers.evaluation.Done.shown` tells it."""
        self.event("evaluation", **shown)
        self._logs.evaluation(shown)
        self._metrics.gauge("evaluation_step", shown["step"], help="Step of the version that was evaluated last")
        parts = shown["environments"] or {next(iter(shown["prompts"])): shown}
        for environment, figures in parts.items():
            told = {"environment": environment}
            self._metrics.gauge("evaluation_accuracy", figures["accuracy"], help="Of that version, held out", **told)
            self._metrics.gauge("evaluation_samples", figures["samples"], help="Rollouts of that", **told)
            for k, value in figures["pass_at"].items():
                self._metrics.gauge("evaluation_pass_at", value, help="pass@k of that version", k=k, **told)

    def agreement(self, *, disagree: bool) -> None:
        """Whether engines and trainer are known to disagree about the policy."""
        self._metrics.gauge("trainer_engine_disagrees", disagree, help="1: the KL from engine to trainer is too large")

    @property
    def cold(self) -> bool:
        """No batch was formed yet."""
        return self._warm is None

    def warm(self, peers: Iterable[Peer]) -> None:
        """The first batch is formed: idle waits count from here."""
        self._warm = self._lane.seconds(), producer_phases(peers)

    def step(self, batch: Batch, result: StepResult, peers: list[Peer]) -> None:
        """One line and the metrics of a step that was made and published."""
        for delivery in batch.deliveries:
            self._tally.count(delivery.group, "trained")
        moment, seconds = time.perf_counter(), self._lane.seconds()
        wall, idle = moment - self._at, idle_fraction(seconds, self._seconds)
        self._at, self._seconds = moment, seconds
        self.newest = batch.version.step
        self._last = seconds, producer_phases(peers)
        producers = [peer.state for peer in peers if peer.role == "producer" and peer.alive]
        waits = [float(state["idle"]) for state in producers if "idle" in state]
        generated = sum(float(state.get("tokens_per_s", 0.0)) for state in producers)
        self.figures = {"idle": round(idle, 4), "tokens_per_s": round(result.tokens / wall, 1)}
        idle_wait = {"trainer": round(idle, 4)} | ({"producers": round(sum(waits) / len(waits), 4)} if waits else {})
        if waits:
            self._said[0] += wall
            self._said[1] += wall * sum(waits) / len(waits)
        fields = dict(
            step=batch.version.step,
            version=str(batch.version),
            reward=round(result.reward, 4),
            accuracy=None if result.accuracy is None else round(result.accuracy, 4),
            loss=round(result.loss, 6),
            grad_norm=round(result.grad_norm, 4),
            lag=round(sum(batch.lags) / len(batch.lags), 2),
            lag_histogram=histogram(batch.lags),
            masked_tokens=batch.masked,
            rollouts=result.rollouts,
            without_advantage=result.without_advantage,
            learning_rate=result.learning_rate,
            **result.drift.figures(),
            skipped=result.skipped,
            trained_tokens_per_s=self.figures["tokens_per_s"],
            generated_tokens_per_s=round(generated, 1),
            packed_tokens=result.packed_tokens,
            loss_tokens=result.loss_tokens,
            idle_wait=idle_wait,
            seconds=round(wall, 3),
            kept_and_dropped=self._tally.take(),
            **self._standing,
        )
        self._steps.write("step", **fields)
        self._logs.step(batch.version.step, fields)
        self._measure(batch, result, wall)

    def restored(self, batch: Batch) -> None:
        """One line of a step that was a rollback: it has no figures."""
        moment, seconds = time.perf_counter(), self._lane.seconds()
        wall, self._at, self._seconds = moment - self._at, moment, seconds
        self.newest = batch.version.step
        self._steps.write(
            "step",
            step=batch.version.step,
            version=str(batch.version),
            restored=str(batch.restored),
            skipped=f"the weights are those of version {batch.restored} again",
            seconds=round(wall, 3),
            **self._standing,
        )
        self._metrics.gauge("trainer_step", batch.version.step, help="Newest optimizer step")
        self._metrics.count("trainer_steps", outcome="restored", help="Optimizer steps by outcome")

    def replayed(self, batch: Batch, result: StepResult | None, peers: list[Peer]) -> None:
        """A step that an earlier trainer logged was made again. It gets its line, where that one died before it."""
        said = {"restored": str(batch.restored)} if result is None else {"loss": result.loss}
        self.event("replayed", step=batch.version.step, **said)
        if batch.version.step <= self.newest:
            return
        if result is None:
            self.restored(batch)
        else:
            self.step(batch, result, peers)

    def summary(
        self,
        before: Result | None,
        after: Result | None,
        evaluations: list[dict[str, Any]],
        balance: Iterable[Balance],
        steps: int,
        exported: Path,
    ) -> dict[str, Any]:
        """What `summary.json` says. Idle waits are from the first batch to the last step."""
        trainer, producers = self._since_warm()
        seconds = {"trainer": trainer} | ({"producers": producers} if producers else {})
        idle_wait = {stage: round(idle_fraction(phases), 4) for stage, phases in seconds.items()}
        if self._said[0]:
            # Engines without a lane say only how idle they were lately.
            idle_wait.setdefault("producers", round(self._said[1] / self._said[0], 4))
        return {
            "accuracy_before": before.accuracy if before else None,
            "accuracy_after": after.accuracy if after else None,
            "evaluation_samples": after.samples if after else 0,
            "wall_s": round(time.perf_counter() - self._started, 1),
            "steps": steps,
            "idle_wait": idle_wait,
            "seconds": {
                stage: {phase: round(spent, 2) for phase, spent in phases.items()} for stage, phases in seconds.items()
            },
            "balance": {
                sheet.kind: {
                    "admitted": sheet.admitted,
                    "outstanding": sheet.outstanding,
                    "verdicts": sheet.verdicts,
                    "reasons": sheet.reasons,
                    "closed": sheet.closed,
                }
                for sheet in balance
            },
            "evaluations": evaluations,
            "examples": paired(before, after),
            "export": str(exported),
        }

    def close(self) -> None:
        self._recorder.close()
        self._steps.close()
        self._events.close()
        self._logs.close()

    def _since_warm(self) -> tuple[Phases, Phases]:
        if self._warm is None or self._last is None:
            return {}, {}
        producers: Phases = {}
        for name, phases in self._last[1].items():
            for phase, spent in difference(phases, self._warm[1].get(name, {})).items():
                producers[phase] = producers.get(phase, 0.0) + spent
        return difference(self._last[0], self._warm[0]), producers

    def _measure(self, batch: Batch, result: StepResult, wall: float) -> None:
        metrics = self._metrics
        metrics.gauge("trainer_step", batch.version.step, help="Newest optimizer step")
        for name, value in (
            ("loss", result.loss),
            ("reward", result.reward),
            ("grad_norm", result.grad_norm),
            ("learning_rate", result.learning_rate),
            ("tokens_per_s", result.tokens / wall),
            *result.drift.measured(),
        ):
            metrics.gauge(f"trainer_{name}", value)
        if result.accuracy is not None:
            metrics.gauge("trainer_accuracy", result.accuracy, help="Share of right ones among consumed rollouts")
        metrics.count("trainer_steps", outcome=result.skipped or "moved", help="Optimizer steps by outcome")
        metrics.count("trainer_rollouts", result.rollouts, help="Rollouts that were consumed")
        metrics.count("trainer_rollouts_without_advantage", result.without_advantage)
        metrics.count("trainer_tokens", result.tokens, help="Tokens of consumed rollouts")
        metrics.count("trainer_masked_tokens", batch.masked, help="Tokens that were too old to be trained on")
        metrics.count("trainer_packed_tokens", result.packed_tokens, help="Tokens that were computed")
        metrics.observe("trainer_step_seconds", wall, buckets=SECONDS, help="Seconds from one step to the next")
        for lag in batch.lags:
            metrics.observe("trainer_lag", lag, buckets=LAGS, help="Lag of consumed groups, in steps")


def lanes_of(peer: Peer) -> list[dict[str, Any]]:
    """What a heartbeat says of the lanes of a service; what is none is left out."""
    said = peer.state.get("lanes")
    return [
        {name: lane[name] for name in LANE_FIELDS if name in lane}
        for lane in (said if isinstance(said, list) else ())
        if isinstance(lane, Mapping)
        and isinstance(lane.get("lane"), str)
        and isinstance(lane.get("begin"), float | int)
        and isinstance(lane.get("sums"), Mapping)
    ]


def producer_phases(peers: Iterable[Peer]) -> dict[str, Phases]:
    """Seconds per phase of each producer's engine since its start, as its heartbeat says them under "seconds"."""
    return {
        peer.name: {str(phase): float(spent) for phase, spent in peer.state["seconds"].items()}
        for peer in peers
        if peer.role == "producer" and isinstance(peer.state.get("seconds"), Mapping)
    }


def difference(after: Phases, before: Phases) -> Phases:
    """Seconds per phase between two readings."""
    spent = {phase: seconds - before.get(phase, 0.0) for phase, seconds in after.items()}
    return {phase: seconds for phase, seconds in spent.items() if seconds > 0}
