"""The decode loop: fills slots, steps the model, samples, and swaps weights between two steps.

Wait graph: the loop runs in a thread of its own and waits for commands only while no slot is occupied and nobody is
in line (woken by `send`); it never waits for the event loop. The event loop waits for the results that `report` hands
over, once per step at most.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from broker.messages import FinishReason
from headrace.telemetry.phases import Lane
from headrace.version import PolicyVersion
from producers.engines.api import Completion, EngineStats
from producers.engines.effort import efforts
from producers.engines.pace import Pace
from producers.engines.sequences import Sequence, StepPlan, plan_step
from producers.engines.stops import Decode, completes_stop

if TYPE_CHECKING:
    import torch

    from producers.engines.model_runner import ModelRunner


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    ticket: int
    completion: Completion


@dataclass(frozen=True, slots=True, eq=False)
class Swapped:
    version: PolicyVersion
    seconds: float
    """For which decoding stood still."""


@dataclass(frozen=True, slots=True)
class Released:
    """The cache's memory was given back."""


Event = Finished | Swapped | Released
Report = Callable[[list[Event]], None]


@dataclass(frozen=True, slots=True, eq=False)
class Submit:
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Abort:
    ticket: int


@dataclass(frozen=True, slots=True, eq=False)
class Swap:
    version: PolicyVersion
    apply: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Turn:
    """Whether the device is this engine's from now on. Where it is not, what decodes is ended first."""

    has: bool


@dataclass(frozen=True, slots=True)
class Close:
    pass


Command = Submit | Abort | Swap | Turn | Close


@dataclass(slots=True)
class StepTotals:
    """Sums over steps of one kind."""

    steps: int = 0
    seconds: float = 0.0
    rows: int = 0
    """Tokens sampled."""
    prompt_tokens: int = 0
    recomputed_tokens: int = 0
    finished_prompts: int = 0
    """Rows that sampled at the end of a last chunk, not by decoding."""
    occupied: int = 0
    context_tokens: int = 0
    """Live context read by decoding rows, the new tokens included."""


@dataclass(slots=True)
class _Settings:
    """Sampling settings per slot, as arrays so that a step takes them without a loop."""

    temperature_S: np.ndarray
    top_p_S: np.ndarray
    top_k_S: np.ndarray
    seed_S: np.ndarray
    sampled_S: np.ndarray

    @classmethod
    def of(cls, slots: int) -> _Settings:
        return cls(
            np.ones(slots), np.ones(slots), np.zeros(slots, np.int64), np.zeros(slots, np.uint64),
            np.zeros(slots, np.uint64),
        )  # fmt: skip

    def put(self, slot: int, sequence: Sequence) -> None:
        sampling = sequence.request.sampling
        self.temperature_S[slot] = sampling.temperature
        self.top_p_S[slot] = sampling.top_p
        self.top_k_S[slot] = sampling.top_k
        self.seed_S[slot] = sequence.seed
        self.sampled_S[slot] = 0


class DecodeLoop:
    """Everything but `send` and `stats` runs on the loop's own thread."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        slots: int,
        pace: Pace,
        recompute: bool,
        report: Report,
        lane: Lane,
        decode: Decode | None,
    ) -> None:
        """`recompute`: a swap empties the cache of running sequences, which is filled anew as prompts are."""
        self._runner = runner
        self._pace = pace
        self._shortest_first = False
        self._recompute = recompute
        self._report = report
        self._lane = lane
        self._decode = decode
        self._commands: deque[Command] = deque()
        self._arrived = threading.Condition()
        self._waiting: deque[Sequence] = deque()
        self._slots: list[Sequence | None] = [None] * slots
        self._settings = _Settings.of(slots)
        self._version: PolicyVersion | None = None
        self._events: list[Event] = []
        self._closing = False
        self._turn, self._ending = True, False
        """Whether the device is its own; whether the end of that has yet to be told."""
        self.pure = StepTotals()
        """Steps in which every row decodes."""
        self.mixed = StepTotals()
        """Steps with tokens of prompts or of a recomputation in them."""

    def send(self, command: Command) -> None:
        """Hand over a command; any thread. Taken at the next step boundary."""
        with self._arrived:
            self._commands.append(command)
            self._arrived.notify()

    def stats(self) -> EngineStats:
        pure, mixed = self.pure, self.mixed
        return EngineStats(
            slots=len(self._slots),
            busy_slots=sum(sequence is not None for sequence in self._slots),
            waiting=len(self._waiting) + sum(isinstance(command, Submit) for command in tuple(self._commands)),
            decode_steps=pure.steps + mixed.steps,
            decoded_tokens=pure.rows + mixed.rows,
            prefill_tokens=pure.prompt_tokens + mixed.prompt_tokens,
            busy_slot_steps=pure.occupied + mixed.occupied,
            recomputed_tokens=pure.recomputed_tokens + mixed.recomputed_tokens,
        )

    def contexts(self) -> list[int]:
        """Tokens of each occupied slot with its next one. On the loop's own thread, as in `Swap.apply`."""
        return [sequence.cached + 1 for sequence in self._slots if sequence is not None]

    def run(self) -> None:
        """Until a `Close` command; then every open sequence ends with "abort"."""
        while not self._closing:
            self.turn()

    def turn(self) -> None:
        """Take what was sent, make one step, and report; waits for a command while there is nothing to do."""
        for command in self._receive():
            self._apply(command)
        self._heed_turn()
        self._fill_slots()
        if self._version is not None:
            self._step(self._plan(self._version))
        self._flush()

    def _heed_turn(self) -> None:
        """Give the memory of the cache back once it may not be used and nothing is in it; have it again."""
        if self._ending and not self._occupied():
            self._ending = False
            self._runner.free()
            self._events.append(Released())
        elif self._turn:
            self._runner.reserve()

    def _plan(self, version: PolicyVersion) -> StepPlan:
        """Prompts are served in order of arrival and shortest first in turn: a short one waits for no long one, and a
        long one has every second step.
        """
        self._shortest_first = not self._shortest_first
        decoding = any(sequence.pending == 1 for sequence in self._slots if sequence is not None)
        budget = self._pace.budget(decoding=decoding)
        return plan_step(self._slots, version, budget, shortest_first=self._shortest_first)

    def _receive(self) -> list[Command]:
        with self._arrived:
            if not (self._commands or self._ending or (self._waiting and self._turn) or self._occupied()):
                self._lane.wait()
                while not self._commands:
                    self._arrived.wait()
            commands = list(self._commands)
            self._commands.clear()
        return commands

    def _occupied(self) -> bool:
        return any(sequence is not None for sequence in self._slots)

    def _apply(self, command: Command) -> None:
        match command:
            case Submit(sequence):
                self._waiting.append(sequence)
            case Abort(ticket):
                self._abort(ticket)
            case Swap(version, apply):
                self._lane.enter("swap")
                start = time.perf_counter()
                apply()
                if self._recompute and version != self._version:
                    for sequence in filter(None, self._slots):
                        sequence.outdate()
                self._version = version
                self._events.append(Swapped(version, time.perf_counter() - start))
            case Turn(has):
                self._turn, self._ending = has, not has
            case Close():
                self._closing = True
                for sequence in [*self._waiting, *filter(None, self._slots)]:
                    self._abort(sequence.ticket)

    def _abort(self, ticket: int) -> None:
        for sequence in self._waiting:
            if sequence.ticket == ticket:
                self._waiting.remove(sequence)
                self._events.append(Finished(ticket, sequence.complete("abort", time.perf_counter())))
                return
        for slot, running in enumerate(self._slots):
            if running is not None and running.ticket == ticket:
                self._finish(slot, running, "abort")

    def _fill_slots(self) -> None:
        for slot, sequence in enumerate(self._slots):
            if not self._waiting or not self._turn:
                return
            if sequence is None:
                taken = self._waiting.popleft()
                taken.slot_at = time.perf_counter()
                self._slots[slot] = taken
                self._settings.put(slot, taken)

    def _step(self, plan: StepPlan) -> None:
        if plan.empty:
            return
        for slot in plan.begins:
            self._at(slot).prompt_version = self._version
        for copy in plan.copies:
            self._at(copy.target).cached = copy.count
        self._enter(plan)
        start = time.perf_counter()
        for copy in plan.copies:
            self._runner.copy_prompt(copy)
        sampling, logits_RV = self._forward(plan)
        occupied = sum(sequence is not None for sequence in self._slots)
        self._sample(sampling, logits_RV)
        totals = self.mixed if plan.chunks or plan.copies else self.pure
        seconds = time.perf_counter() - start
        self._pace.note(seconds, plan.work)
        totals.steps += 1
        totals.seconds += seconds
        totals.rows += len(sampling)
        totals.prompt_tokens += plan.prefilled
        totals.recomputed_tokens += plan.recomputed
        totals.finished_prompts += len(sampling) - len(plan.decode)
        totals.occupied += occupied

    def _enter(self, plan: StepPlan) -> None:
        """The step's phases, with their shares of its time by floating-point operations."""
        contexts = [self._at(slot).cached + 1 for slot in plan.decode]
        runner, lane = self._runner, self._lane
        parts = efforts(runner.shape, runner.itemsize, contexts, plan.chunks, plan.recomputed)
        for part in parts:
            lane.did(part.phase, part.flop, part.nbytes)
        if len(parts) == 1:
            lane.enter(parts[0].phase)
        else:
            lane.enter_shared([(part.phase, part.flop) for part in parts])

    def _forward(self, plan: StepPlan) -> tuple[list[int], torch.Tensor]:
        """Run the step; returns the slots that sample and their logits, row by row."""
        slots_B = np.array(plan.decode, np.int64)
        lengths_B = np.array([self._at(slot).cached + 1 for slot in plan.decode], np.int64)
        tokens = [self._at(slot).token_ids(self._at(slot).cached, 1) for slot in plan.decode]
        sampling, rows, end = list(plan.decode), list(range(len(plan.decode))), len(plan.decode)
        for chunk in plan.chunks:
            sequence = self._at(chunk.slot)
            tokens.append(sequence.token_ids(chunk.start, chunk.count))
            end += chunk.count
            if sequence.pending == chunk.count:
                sampling.append(chunk.slot)
                rows.append(end - 1)
        # A step of unfinished chunks samples nothing; the model still wants one row.
        sample_rows_R = np.array(rows or [end - 1], np.int64)
        logits_RV = self._runner.forward(slots_B, lengths_B, list(plan.chunks), np.concatenate(tokens), sample_rows_R)
        for slot in plan.decode:
            self._at(slot).cached += 1
        for chunk in plan.chunks:
            self._at(chunk.slot).cached += chunk.count
        totals = self.mixed if plan.chunks or plan.copies else self.pure
        totals.context_tokens += int(lengths_B.sum())
        return sampling, logits_RV

    def _sample(self, slots: list[int], logits_RV: torch.Tensor) -> None:
        from headrace.policy.sampling import RowSettings, sample, uniforms

        if not slots:
            return
        settings, rows = self._settings, np.array(slots)
        drawn_R = uniforms(settings.seed_S[rows], settings.sampled_S[rows])
        chosen = RowSettings(settings.temperature_S[rows], settings.top_p_S[rows], settings.top_k_S[rows])
        tokens_R, logprobs_R = sample(logits_RV, chosen, drawn_R)
        settings.sampled_S[rows] += np.uint64(1)
        for slot, token, logprob in zip(slots, tokens_R.tolist(), logprobs_R.tolist(), strict=True):
            self._append(slot, token, logprob)

    def _append(self, slot: int, token: int, logprob: float) -> None:
        sequence = self._at(slot)
        assert self._version is not None
        if not sequence.tokens:
            sequence.first_at = time.perf_counter()
        sequence.spans.note(len(sequence.tokens), self._version, sequence.prompt_version)
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        sampling = sequence.request.sampling
        stopped = token in sampling.stop_token_ids
        if not stopped and sampling.stop and self._decode is not None:
            stopped = completes_stop(sequence.tokens, sampling.stop, self._decode)
        if stopped:
            self._finish(slot, sequence, "stop")
        elif len(sequence.tokens) >= sequence.limit:
            self._finish(slot, sequence, "length")

    def _finish(self, slot: int, sequence: Sequence, reason: FinishReason) -> None:
        self._slots[slot] = None
        self._bequeath(slot, sequence)
        self._runner.table.release(slot)
        self._events.append(Finished(sequence.ticket, sequence.complete(reason, time.perf_counter())))

    def _bequeath(self, slot: int, sequence: Sequence) -> None:
        """Somebody who waited for this prompt's copy, or to begin with it, takes what is there."""
        if sequence.prompt_version != self._version or not sequence.cached:
            return
        for other, heir in enumerate(self._slots):
            if heir is not None and heir.prompt_key == sequence.prompt_key and heir.cached == 0:
                heir.cached = min(sequence.cached, heir.prompt - 1)
                heir.prompt_version = sequence.prompt_version
                self._runner.table.release(other)
                self._runner.table.move(slot, other)
                return

    def _flush(self) -> None:
        if self._events:
            self._report(self._events)
            self._events = []

    def _at(self, slot: int) -> Sequence:
        sequence = self._slots[slot]
        assert sequence is not None
        return sequence
