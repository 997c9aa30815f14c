"""`headrace generate`: plays tasks as a producer does, with neither Redis nor a trainer, and hands over the samples.

Wait graph: each group waits for its completions and scores; the main task waits for the groups, in their order.
Cancelling it (Ctrl-C, SIGTERM) aborts what plays, and ends the engine and the scorer's processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from broker.messages import Task, TaskDelivery, TaskKind
from deploy.generate_show import Shown, parts_of
from headrace.config import Config
from headrace.errors import ConfigError, HeadraceError
from headrace.words import counted
from producers.engines.registry import engine_factory
from producers.environments.api import Environment, Rollout
from producers.environments.pass_rates import Measured, write_pass_rates
from producers.environments.registry import sizes_of
from producers.environments.single_turn import SingleTurn
from producers.group import Stage, play_group
from producers.in_play import InPlay, Seat
from producers.rewards.worker import Score
from producers.rollout import Played
from producers.solo import FIRST, open_environments, open_player, open_stage

Print = Callable[[Shown], None]
PROMPT = "prompt"
"""What the environment of a user's own prompt is called."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be sampled."""

    config: Config
    prompt: str | None = None
    """A text of the user's own, instead of an environment's prompts."""
    tasks: int = 4
    first: int = 0
    samples: int = 1
    split: TaskKind = "train"
    pass_rates: Path | None = None


def run(wish: Wish, show: Print) -> int:
    """The exit code: 1 when no sample came out. Raises the errors of configuration, model, engine and environment."""
    if wish.pass_rates is not None:
        _check_pass_rates(wish, wish.pass_rates)
    if any("\ud800" <= letter <= "\udfff" for letter in wish.prompt or ""):
        raise ConfigError("--prompt is not text in UTF-8")
    engine_factory(wish.config.producer.engine)  # before all that takes long
    try:
        return asyncio.run(_run(wish, show))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


async def _run(wish: Wish, show: Print) -> int:
    main = asyncio.current_task()
    assert main is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main.cancel)
    done = _Done()
    try:
        async with AsyncExitStack() as stack:
            step = stack.enter_context(_progress())
            studio = await _open(wish, stack)
            step(len(studio.tasks))
            groups = await stack.enter_async_context(aclosing(studio.played()))
            async for group in groups:
                step(0)
                done.add(group)
                for sample in group:
                    show(sample)
    finally:
        # What was measured is good, also when it is not all that was asked for; nothing replaces no file.
        if wish.pass_rates is not None and done.measured:
            done.write(wish.pass_rates)
    print(done.sentence(wish.pass_rates), file=sys.stderr)
    return 0 if done.good else 1


@dataclass(slots=True)
class _Done:
    """What came out so far."""

    good: int = 0
    failed: int = 0
    tokens: int = 0
    measured: list[Measured] = field(default_factory=list)

    def add(self, group: list[Shown]) -> None:
        verdicts = [sample.correct for sample in group if not sample.failure and sample.correct is not None]
        self.good += sum(not sample.failure for sample in group)
        self.failed += sum(bool(sample.failure) for sample in group)
        self.tokens += sum(sample.sampled_tokens for sample in group)
        if verdicts:
            self.measured.append(Measured(group[0].index, sum(verdicts) / len(verdicts), len(verdicts)))

    def write(self, file: Path) -> None:
        try:
            write_pass_rates(file, self.measured)
        except OSError as error:
            raise ConfigError(f"--pass-rates {file} cannot be written ({error.strerror})") from error

    def sentence(self, file: Path | None) -> str:
        samples = f"{counted(self.good, 'sample')} of {counted(self.tokens, 'token')}"
        failed = f", {self.failed} failed" if self.failed else ""
        if not self.measured:
            return samples + failed
        rate = sum(line.pass_rate * line.samples for line in self.measured) / sum(
            line.samples for line in self.measured
        )
        where = f", written to {file}" if file is not None else ""
        return f"{samples}{failed}; right: {rate:.1%} over {counted(len(self.measured), 'prompt')}{where}"


@dataclass(slots=True)
class _Studio:
    """All tasks, and where they are played."""

    wish: Wish
    tasks: list[Task]
    stage: Stage
    heard: dict[tuple[str, int], tuple[Played, Score]]

    async def played(self) -> AsyncGenerator[list[Shown], None]:
        """Group by group, in their order; as many play at once as fill the slots, and one more."""
        at_once = self.stage.player.engine.slots // self.wish.samples + 1
        coming, playing = deque(self.tasks), deque[asyncio.Task[list[Shown]]]()
        try:
            while coming or playing:
                while coming and len(playing) < at_once:
                    playing.append(asyncio.create_task(self._play(coming.popleft())))
                yield await playing[0]
                playing.popleft()
        finally:
            for group in playing:
                group.cancel()
            await asyncio.gather(*playing, return_exceptions=True)

    async def _play(self, task: Task) -> list[Shown]:
        in_play = InPlay(task.group_size)
        try:
            await play_group(self.stage, TaskDelivery("", 1, task), in_play, self.wish.config.broker.task_deadline_s)
        except* HeadraceError as errors:
            raise first_of(errors) from None
        return [await self._shown(task, number, seat) for number, seat in enumerate(in_play.seats)]

    async def _shown(self, task: Task, number: int, seat: Seat) -> Shown:
        played, score = self.heard.pop((task.task_id, number), (None, Score()))
        member, free = seat.member, self.wish.prompt is not None
        trajectory = member.trajectory if member is not None else None
        correct = trajectory.correct if trajectory is not None and not free else None
        if self.wish.pass_rates is not None and correct is None and trajectory is not None and played is not None:
            correct = (await self.stage.scorer.score(task.environment, "eval", played.rollout)).correct
        chat = self.stage.player.chat
        return Shown(
            environment="" if free else task.environment,
            split=task.kind,
            index=task.index,
            member=number,
            samples=task.group_size,
            parts=parts_of(
                trajectory or seat.transcript.trajectory(0.0, "abort"),
                getattr(chat, "written", chat.text),
                tuple(turn.reward for turn in played.rollout.turns) if played is not None else (),
            ),
            reward=trajectory.reward if trajectory is not None and not free else None,
            correct=correct,
            finish_reason=trajectory.finish_reason if trajectory is not None else "",
            failure="" if trajectory is not None else (member.failure if member is not None else "it was ended"),
            seconds=played.decode_s if played is not None else 0.0,
            summands=score.parts,
        )


async def _open(wish: Wish, stack: AsyncExitStack) -> _Studio:
    heard: dict[tuple[str, int], tuple[Played, Score]] = {}

    def hear(task: Task, number: int, played: Played, score: Score) -> None:
        heard[task.task_id, number] = played, score

    if wish.prompt is not None:
        player = await open_player(wish.config, stack)
        stage = Stage("generate", player, {PROMPT: _OnePrompt(wish.prompt)}, _Unscored(), 1, heard=hear)
        return _Studio(wish, [_task(wish, PROMPT, 0)], stage, heard)
    environments = await open_environments(wish.config, stack)
    tasks = [_task(wish, name, index) for name, each in environments.items() for index in _indices(wish, name, each)]
    player = await open_player(wish.config, stack)
    return _Studio(wish, tasks, open_stage(wish.config, player, environments, stack, hear), heard)


def _indices(wish: Wish, name: str, environment: Environment) -> range:
    """Raises ConfigError where there are none."""
    size = sizes_of(name, environment)[wish.split == "eval"]
    if wish.first >= size:
        kind = "training" if wish.split == "train" else "held-out"
        raise ConfigError(f"environment {name!r} has {counted(size, f'{kind} prompt')}, and --first is {wish.first}")
    return range(wish.first, min(wish.first + wish.tasks, size))


def _task(wish: Wish, name: str, index: int) -> Task:
    digest = hashlib.blake2b(f"{wish.config.run.seed}/{name}/{wish.split}/{index}".encode(), digest_size=8).digest()
    return Task(
        task_id=f"{name}/{wish.split}/{index}",
        kind=wish.split,
        environment=name,
        index=index,
        seed=int.from_bytes(digest, "little") >> 1,
        group_size=wish.samples,
        min_version=FIRST,
        deadline_ms=0,
    )


def _check_pass_rates(wish: Wish, file: Path) -> None:
    """What would make a file that no environment could use. Raises ConfigError."""
    entries = wish.config.environments
    if wish.prompt is not None or wish.split == "eval":
        raise ConfigError("--pass-rates are of training prompts; leave --prompt and --eval out")
    if len(entries) > 1:
        names = ", ".join(entry.called for entry in entries)
        raise ConfigError(f"--pass-rates are of one environment, and there are several; name one of {names} with --env")
    filters = [name for name in ("pass_rates", "pass_rate_column") if entries[0].options.get(name)]
    if filters:
        raise ConfigError(
            f"--pass-rates counts prompts as they are without a filter, and the environment has options.{filters[0]}; "
            f"leave that out"
        )
    if not file.parent.is_dir():
        raise ConfigError(f"--pass-rates {file} cannot be written: there is no folder {file.parent}")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    """On standard error, where that is a terminal. The function sets the total, then counts one group with each 0."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    bar = Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=False,
    )
    with bar:
        line = bar.add_task("loading model and environments", total=None)

        def step(total: int) -> None:
            if total:
                bar.update(line, description="prompts", total=total)
            else:
                bar.advance(line)

        yield step


def first_of(errors: BaseExceptionGroup[HeadraceError]) -> HeadraceError:
    one: BaseException = errors
    while isinstance(one, BaseExceptionGroup):
        one = one.exceptions[0]
    assert isinstance(one, HeadraceError)
    return one


class _OnePrompt:
    """The user's own prompt as an environment; nothing is right or wrong about an answer to it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __len__(self) -> int:
        return 1

    def eval_size(self) -> int:
        return 0

    def episode(self, split: str, index: int, seed: int) -> SingleTurn:
        return SingleTurn(self._text, None)

    async def score(self, rollout: Rollout) -> float:
        return 0.0

    def correct(self, rollout: Rollout) -> bool:
        return False


class _Unscored:
    """Where there is nothing to score."""

    async def score(self, name: str, kind: TaskKind, rollout: Rollout) -> Score:
        return Score()

    async def score_group(self, name: str, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score() for _ in rollouts]
