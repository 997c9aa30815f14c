"""`headrace evaluate`: held-out prompts on one version of a run, or on a model folder, with no service of a run.

Wait graph: each group waits for its completions and scores; the main task waits for the groups, of which as many play
at once as fill the slots. Cancelling it (Ctrl-C, SIGTERM) aborts what plays, and ends the engine and the scorer's
processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.messages import Task, TaskDelivery
from consumers.curriculum import Source, check_held_out, held_out_of, held_out_task
from consumers.evaluation import Answer, Evaluation, Prompt, Result, result_of
from deploy.asked import NO_TRAINER
from deploy.connections import local_run, named, open_operator, told_url
from deploy.generate import first_of
from deploy.run_folder import RunFolder, local_runs
from headrace.config import Config
from headrace.config_sources import flatten, resolve, scalar, validated
from headrace.errors import ConfigError, HeadraceError
from headrace.version import PolicyVersion
from producers.engines.registry import engine_factory
from producers.environments.registry import sizes_of
from producers.group import Stage, play_group
from producers.in_play import InPlay
from producers.solo import FIRST, open_environments, open_player, open_stage


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be evaluated, and how."""

    folder: Path | None = None
    """A model folder; None for a version of a run."""
    file: Path | None = None
    run: str | None = None
    """Whose configuration it is, and whose version."""
    version: PolicyVersion | None = None
    """None is the run's newest checkpoint."""
    prompts: int | None = None
    overrides: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """What came of it."""

    of: str
    """A folder, or a run's version."""
    samples_per_prompt: int
    prompts: dict[str, int]
    result: Result

    def as_json(self) -> dict[str, Any]:
        result = self.result
        return {
            "of": self.of,
            "prompts": self.prompts,
            "samples_per_prompt": self.samples_per_prompt,
            "accuracy": round(result.accuracy, 6),
            "samples": result.samples,
            "failed": result.failed,
            "pass_at": result.pass_at,
            "environments": result.environments,
        }


def run(wish: Wish) -> Found | None:
    """None when it was ended by SIGTERM. Raises the errors of configuration, model, engine and environment."""
    with ExitStack() as stack:
        config, of = _settle(wish, stack)
        engine_factory(config.producer.engine)  # before all that takes long
        try:
            return asyncio.run(_evaluated(config, of, wish.prompts))
        except asyncio.CancelledError:
            return None


# -- what is evaluated


def _settle(wish: Wish, stack: ExitStack) -> tuple[Config, str]:
    """The configuration, with the model to sample from, and what that is called. Raises HeadraceError."""
    if wish.folder is not None:
        if wish.version is not None:
            raise ConfigError(
                f"--version {wish.version} is of a run, and {wish.folder} is a model folder; name one of the two"
            )
        if not wish.folder.is_dir():
            raise ConfigError(f"{wish.folder} is no folder; name a model folder, or a run with --run")
        config = _config_of_run(local_run(wish.run), wish) if wish.run else _config_of_file(wish)
        return _with_model(config, wish.folder.absolute()), str(wish.folder)
    run = _run(wish)
    out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-evaluate-"))) / "model"
    return _with_model(_config_of_run(run, wish), out), f"run {run.run_id}, version {_write(run, wish.version, out)}"


def _run(wish: Wish) -> RunFolder:
    if wish.file is not None:
        raise ConfigError("--config is for a model folder; a run has a configuration of its own, which --set changes")
    if run := named(wish.run):
        return local_run(run)
    from deploy.connections import runs_folder

    if found := local_runs(runs_folder()):
        return found[-1]
    raise ConfigError(f"there is no run in {runs_folder()}; name a model folder to evaluate that")


def _write(run: RunFolder, version: PolicyVersion | None, out: Path) -> PolicyVersion:
    """A version's weights as a model folder: out of a checkpoint, else out of the memory of a run that lives."""
    from consumers import checkpoint
    from deploy.exporting import export_checkpoint

    newest = checkpoint.newest(run.path)
    if version is None:
        if newest is None:
            raise ConfigError(f"run {run.run_id} has no checkpoint yet; name a version of `headrace weights list`")
        version = newest[0]
    folder = checkpoint.folder_of(run.path, version)
    if folder.is_dir():
        export_checkpoint(run, folder, out)
        return version
    if not run.live and told_url() is None:
        raise ConfigError(f"run {run.run_id} has no checkpoint of version {version}, and does not run any more")
    from deploy.weights_export import export

    async def from_memory() -> None:
        async with open_operator(run.run_id) as (run_id, port):
            await export(run_id, port, version, out)

    asyncio.run(from_memory())
    return version


def _config_of_file(wish: Wish) -> Config:
    return resolve(wish.file, os.environ, [*wish.overrides, *NO_TRAINER]).config


def _config_of_run(run: RunFolder, wish: Wish) -> Config:
    """As it was stored, with what the command changes."""
    tree = run.read_json(run.config_file) or {}
    known = dict(flatten(tree))
    for item in (*wish.overrides, *NO_TRAINER):
        key, equals, text = item.partition("=")
        section, _, leaf = key.partition(".")
        if not equals or not leaf or key not in known:
            raise ConfigError(f"--set {item!r} names no value of the run, as evaluation.samples_per_prompt=8 does")
        tree[section][leaf] = scalar(text)
    return validated(tree)


def _with_model(config: Config, folder: Path) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})


# -- how


async def _evaluated(config: Config, of: str, most: int | None) -> Found:
    main = asyncio.current_task()
    assert main is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main.cancel)
    async with AsyncExitStack() as stack:
        environments = await open_environments(config, stack)
        sizes = {f"eval/{name}": sizes_of(name, each)[1] for name, each in environments.items()}
        prompts = _prompts(config, sizes, most)
        player = await open_player(config, stack)
        stage = open_stage(config, player, environments, stack)
        samples = config.evaluation.samples_per_prompt
        evaluation = Evaluation("once", FIRST, prompts, samples, pinned=False)
        answers = [answer async for answer in _answers(stage, config, evaluation)]
    by_name = {name: [answer for answer in answers if answer.environment == name] for name in prompts}
    return Found(of, samples, prompts, result_of(answers, by_name if len(prompts) > 1 else None))


def _prompts(config: Config, sizes: dict[str, int], most: int | None) -> dict[str, int]:
    """How many of each environment: as many as are asked for, else as configured, else all. Raises ConfigError."""
    wanted = config.evaluation.prompts if most is None else most
    counted = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"prompts": 1})})
    sources: Sequence[Source] = held_out_of(counted, sizes)
    for source in sources:
        if not source.size:
            raise ConfigError(f"environment {source.environment!r} has no held-out prompts")
        check_held_out(source, wanted)
    return {source.environment: wanted or source.size for source in sources}


async def _answers(stage: Stage, config: Config, evaluation: Evaluation) -> Any:
    """Prompt by prompt; as many play at once as fill the slots, and one more."""
    at_once = stage.player.engine.slots // evaluation.samples + 1
    coming, playing = deque(_tasks(config, evaluation)), deque[asyncio.Task[Answer]]()
    try:
        while coming or playing:
            while coming and len(playing) < at_once:
                playing.append(asyncio.create_task(_play(stage, config, coming.popleft())))
            yield await playing[0]
            playing.popleft()
    finally:
        for one in playing:
            one.cancel()
        await asyncio.gather(*playing, return_exceptions=True)


def _tasks(config: Config, evaluation: Evaluation) -> Iterator[Task]:
    """The same as a run with this configuration asks."""
    seed = config.run.seed if config.evaluation.seed is None else config.evaluation.seed
    for prompt in evaluation.asks():
        yield _task(evaluation, prompt, seed)


def _task(evaluation: Evaluation, prompt: Prompt, seed: int) -> Task:
    name = evaluation.task_id(prompt)
    size, version = evaluation.samples, evaluation.version
    return held_out_task(
        name, prompt.environment, prompt.index, seed=seed, group_size=size, version=version, deadline_ms=0
    )


async def _play(stage: Stage, config: Config, task: Task) -> Answer:
    in_play = InPlay(task.group_size)
    try:
        group = await play_group(stage, TaskDelivery("", 1, task), in_play, config.broker.task_deadline_s)
    except* HeadraceError as errors:
        raise first_of(errors) from None
    right = sum(trajectory.reward > 0 for trajectory in group.trajectories)
    return Answer(task.environment, task.index, right, len(group.trajectories))
