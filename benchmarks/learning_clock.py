"""A whole training on a clock of its own: one fleet, one trainer, and what lies between them.

Everything that decides is the product's: admission (`consumers/admission.py`), the curriculum, batches and what is too
old for them, the trainer with its losses, and the embedded engine's decode loop, into which weights come while
sequences run. Services, broker and processes are left out, and with them every influence of the machine: time is
counted, not measured. Its unit is the decode step of the fleet, which takes as long with few sequences as with many;
an optimizer step takes TRAIN of them, and a version is in the engine PUBLISH after its optimizer step. So a training is
the same whenever and wherever it is made, up to the rounding of the processor's matrix products.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.learning_task import CONTEXT, END, LONGEST, PROMPTS, Examination, prompt, reward
from broker.messages import Group, GroupDelivery, Task, Trajectory
from consumers.admission import Window
from consumers.batch import Batch, Batcher
from consumers.curriculum import Curriculum, Prompt, Source
from consumers.lag import History, Staleness
from consumers.trainer import Trainer
from headrace.config import Config
from headrace.policy.loading import layout_of
from headrace.telemetry.phases import Lane
from headrace.version import PolicyVersion
from producers.engines.api import Completion, Request, SamplingParams
from producers.engines.decode_loop import DecodeLoop, Finished, Submit, Swap
from producers.engines.model_runner import ModelRunner
from producers.engines.pace import Pace
from producers.engines.seeds import request_seed
from producers.engines.sequences import Sequence
from producers.engines.weights import EngineWeights
from producers.rollout import request_seed as member_seed
from producers.transcript import Transcript
from weightsync.manifest import Layout

TRAIN, PUBLISH = 12, 1
"""Decode steps that an optimizer step takes, and the way of a version to the fleet. The first is about what a batch
takes to be generated alone, so that a run without lag spends as much time on either."""
MAX_NEW_TOKENS = LONGEST + 1
FIRST = PolicyVersion(1, 0)


@dataclass(slots=True)
class Course:
    """What came of a training, step by step; the first entry is before any."""

    rewards: list[float] = field(default_factory=list)
    """Expected reward of each version."""
    times: list[int] = field(default_factory=lambda: [0])
    """When the version was made, in decode steps."""
    lags: list[int] = field(default_factory=list)
    """Of each group that was trained on."""
    stale: int = 0
    """Groups that were too old."""


class Fleet:
    """The embedded engine, stepped from outside: all slots of all producers as one."""

    def __init__(self, model: Any, slots: int) -> None:
        """`model` is the engine's own from now on; it is that of version FIRST."""
        self.layout = Layout.of(layout_of(model, "float32"))
        runner = ModelRunner(model, slots, CONTEXT)
        self._weights = EngineWeights(model)
        self._loop = DecodeLoop(
            runner,
            slots=slots,
            # No prompt is held back by what steps took on this machine.
            pace=Pace(slots * CONTEXT, math.inf, runner.wide_context),
            recompute=False,
            report=self._report,
            lane=Lane("engine", "start"),
            decode=None,
        )
        self._finished: list[Completion] = []
        self._tickets = 0
        self.version = FIRST
        self.open = 0
        """Requests that are not answered."""
        self.commit(FIRST)

    def submit(self, request: Request) -> None:
        self._tickets += 1
        self.open += 1
        self._loop.send(
            Submit(
                Sequence(
                    ticket=self._tickets,
                    request=request,
                    seed=request_seed(request, 0),
                    limit=request.sampling.max_new_tokens,
                    asked_at=0.0,
                    prompt_key=request.prompt_ids_P.tobytes(),
                )
            )
        )

    def stage(self, content: npt.NDArray[np.uint8]) -> None:
        self._weights.stage(self.layout)[:] = content

    def commit(self, version: PolicyVersion) -> None:
        """Swap to what was staged, if anything, between two decode steps."""
        prepared = self._weights.prepare() if self._weights.staged else None
        self._loop.send(Swap(version, lambda: self._weights.swap(prepared) if prepared else None))
        self.version = version
        if not self.open:
            self._loop.turn()

    def step(self) -> list[Completion]:
        """One decode step; the requests that it finished."""
        self._loop.turn()
        done, self._finished = self._finished, []
        self.open -= len(done)
        return done

    def _report(self, events: Iterable[object]) -> None:
        self._finished += [event.completion for event in events if isinstance(event, Finished)]


@dataclass(slots=True)
class Play:
    """A task that is being played."""

    task: Task
    members: list[Trajectory | None]


class Training:
    """One training from the fixed start, as the configuration says."""

    def __init__(self, model: Any, config: Config) -> None:
        model = deepcopy(model)
        trainer, staleness = config.trainer, config.staleness
        self._config = config
        self._fleet = Fleet(deepcopy(model), config.producer.slots)
        self._trainer = Trainer(model, config, Lane("trainer", "start"))
        self._examination = Examination(model)
        self._window = Window(trainer.groups_per_step, staleness.max_lag, config.run.steps)
        self._curriculum = Curriculum(config.run.seed, [Source("countdown", PROMPTS)])
        self._batcher = Batcher(trainer.groups_per_step, Staleness(staleness.max_lag, staleness.stale == "mask"))
        self._history = History({}).begun(FIRST)
        self._formed = 0
        self._cursor = 0
        self._again: deque[Prompt] = deque()
        """To be asked once more, before new ones."""
        self._asked_again = 0
        self._waiting: deque[Task] = deque()
        """Tasks that no slot has begun with."""
        self._playing: dict[str, Play] = {}
        self._now = 0
        self._free_at: int | None = None
        """When the optimizer step that is being made is over."""
        self._coming: deque[tuple[int, PolicyVersion, npt.NDArray[np.uint8]]] = deque()
        """Versions on their way: when they arrive."""
        self.course = Course(rewards=[self._examination.expected_reward()])

    def run(self) -> Course:
        while True:
            self._arrive()
            self._train()
            if self._formed == self._config.run.steps and self._free_at is None:
                return self.course
            self._admit()
            self._begin()
            self._pass_time()

    def _arrive(self) -> None:
        """Versions that are due come into the engine."""
        while self._coming and self._coming[0][0] <= self._now:
            _, version, content = self._coming.popleft()
            self._fleet.stage(content)
            self._fleet.commit(version)

    def _train(self) -> None:
        """End the optimizer step that is over, and begin the next when its groups are here."""
        if self._free_at is not None and self._free_at <= self._now:
            self._free_at = None
        if self._free_at is not None or self._formed == self._config.run.steps:
            return
        for delivery, _ in self._batcher.drop_stale(self._formed, self._history):
            self._ask_again(delivery.group.task_id)
        batch = self._batcher.form(self._formed, self._history, FIRST.incarnation)
        if batch is not None:
            self._step(batch)

    def _step(self, batch: Batch) -> None:
        """The step's weights are made at once, and nobody sees them before its time is over."""
        groups = [delivery.group for delivery in batch.deliveries]
        self._trainer.train(groups, self._formed, FIRST.incarnation)
        self._formed += 1
        self._free_at = self._now + TRAIN
        self._coming.append((self._free_at + PUBLISH, batch.version, self._content()))
        self.course.rewards.append(self._examination.expected_reward())
        self.course.times.append(self._free_at)
        self.course.lags += batch.lags

    def _content(self) -> npt.NDArray[np.uint8]:
        """The weights as they travel."""
        content = np.zeros(self._fleet.layout.nbytes, np.uint8)
        parameters = self._trainer.parameters()
        for spec in self._fleet.layout.tensors:
            content[spec.offset : spec.end] = parameters[spec.name].numpy().reshape(-1).view(np.uint8)
        return content

    def _ask_again(self, task_id: str) -> None:
        self.course.stale += 1
        stale = Prompt.of(task_id)
        assert stale is not None
        if stale.again < self._config.staleness.requeue:
            self._again.append(stale.next)

    def _admit(self) -> None:
        outstanding = len(self._waiting) + len(self._playing) + len(self._batcher)
        for _ in range(self._window.free(self._formed, outstanding)):
            if self._again:
                asked = self._again.popleft()
                self._asked_again += 1
            else:
                asked = Prompt(self._cursor)
                self._cursor += 1
            task = self._curriculum.task(
                asked,
                group_size=self._config.trainer.group_size,
                min_version=self._window.min_version(self._formed, FIRST),
                deadline_ms=0,
                formed=self._formed,
            )
            self._waiting.append(task)

    def _begin(self) -> None:
        """Tasks go to the engine in the order of admission, once it has a version that they may start on."""
        while self._waiting and self._fleet.version >= self._waiting[0].min_version:
            task = self._waiting.popleft()
            self._playing[task.task_id] = Play(task, [None] * task.group_size)
            for member in range(task.group_size):
                sampling = SamplingParams(
                    max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=(END,), seed=member_seed(task.seed, member, 0)
                )
                self._fleet.submit(Request(f"{task.task_id}/{member}", prompt(task.index), sampling))

    def _pass_time(self) -> None:
        """One decode step, or to whatever comes next while no sequence is there."""
        if self._fleet.open:
            for completion in self._fleet.step():
                self._score(completion)
            self._now += 1
            return
        ends = [self._free_at] if self._free_at is not None else []
        self._now = min([*ends, *(due for due, _, _ in self._coming)])

    def _score(self, completion: Completion) -> None:
        task_id, _, member = completion.request_id.rpartition("/")
        play = self._playing[task_id]
        transcript = Transcript()
        transcript.observe(prompt(play.task.index))
        transcript.complete(completion)
        won = reward(play.task.index, completion.token_ids_N)
        play.members[int(member)] = transcript.trajectory(won, completion.finish_reason, won == 1.0)
        done = [trajectory for trajectory in play.members if trajectory is not None]
        if len(done) == len(play.members):
            del self._playing[task_id]
            group = Group(task_id, 1, "train", "countdown", play.task.index, "fleet", tuple(done))
            self._batcher.add(GroupDelivery(task_id, 0, group))
