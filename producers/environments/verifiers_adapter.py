"""Environments of the package verifiers (https://github.com/PrimeIntellect-ai/verifiers), as they are published.

Its environments drive their rollouts themselves, asking an OpenAI-style client; `openai_bridge` turns that around.
What a rollout leaves, its state, is scored by the environment's rubric in the processes that score everything.
"""

from __future__ import annotations

import importlib
import logging
import pickle
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import EnvironmentLoadError
from headrace.objects import load_function, reason
from producers.environments.api import Done, Observation, Rollout, Turn
from producers.environments.calls import RolloutFailed

log = logging.getLogger(__name__)

MODEL = "policy"
"""The name of the model that environments see."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What is left of a rollout: its state as bytes, or what the rubric said of one that cannot leave its process."""

    state: bytes = field(default=b"", repr=False, compare=False)
    """Differs in its times and ids when the same rollout is played again."""
    reward: float | None = None


class Verifiers:
    """Rows of an environment's data set; the reward is its rubric's, right is one of `pass_threshold` or more.

    `environment` is the name of a published one ("sophistry-bench-sprint"), whose package is installed, or your own
    function that makes one, as `package.module:function`; `args` are its arguments. Held out for evaluations are the
    rows of its own evaluation set, else the last `held_out` ones of its training set.
    """

    def __init__(self, *, environment: str, args: Mapping[str, Any] | None = None, held_out: int = 0) -> None:
        """Raises EnvironmentLoadError."""
        self._name = environment
        self._environment = load(environment, dict(args or {}))
        self._teardown: Any = _once(self._environment)
        self._threshold = float(getattr(self._environment, "pass_threshold", 0.5))
        self._scored: tuple[bytes, float] = (b"", 0.0)
        self._train, self._eval = self._parts(held_out)

    def __len__(self) -> int:
        return len(self._train)

    def eval_size(self) -> int:
        return len(self._eval)

    def episode(self, split: str, index: int, seed: int) -> VerifiersEpisode:
        """The seed does not matter: the row says it all."""
        return VerifiersEpisode(self._environment, dict((self._eval if split == "eval" else self._train)[index]))

    async def score(self, rollout: Rollout) -> float:
        """Raises RolloutFailed for a rollout that did not end."""
        ended = rollout.answer
        if not isinstance(ended, Ended):
            raise RolloutFailed("the rollout has no state that a rubric could score")
        if ended.reward is not None:
            return ended.reward
        if self._scored[0] != ended.state:  # asked twice of each: is it right, and its reward
            state = pickle.loads(ended.state)  # noqa: S301 - our own parent process wrote it
            self._scored = (ended.state, await rewarded(self._environment, state))
        return self._scored[1]

    async def correct(self, rollout: Rollout) -> bool:
        return await self.score(rollout) >= self._threshold

    async def teardown(self) -> None:
        """Once per producer; the package would do it as the process ends, otherwise."""
        await self._teardown()

    def _parts(self, held_out: int) -> tuple[Any, Any]:
        """Rows to train on and rows that are held out."""
        own = self._environment
        try:
            own_eval = own.build_eval_dataset()
            train = own.build_dataset()
        except Exception as error:
            raise EnvironmentLoadError(f"verifiers: {self._name!r} cannot load its data ({reason(error)})") from error
        if own_eval is not None and held_out:
            raise EnvironmentLoadError(f"verifiers: {self._name!r} has held-out rows of its own; leave out held_out")
        rows: Any = [] if train is None else train
        if own_eval is not None:
            return rows, own_eval
        if not 0 <= held_out < max(len(rows), 1):
            raise EnvironmentLoadError(
                f"verifiers: held_out = {held_out} of the {len(rows)} rows of {self._name!r} leaves none to train on"
            )
        if not held_out:
            return rows, []
        first = len(rows) - held_out
        return rows.select(range(first)), rows.select(range(first, len(rows)))


class VerifiersEpisode:
    """One rollout of an environment, driven by it, one request at a time."""

    def __init__(self, environment: Any, row: Mapping[str, Any]) -> None:
        # Here, because the packages that it needs come with verifiers.
        from producers.environments.openai_bridge import Bridge

        self._environment, self._row = environment, row
        self._bridge = Bridge(self._run)
        self._ended: Ended | None = None

    @property
    def answer(self) -> Any:
        """To be awaited: the rollout may have been ended by a limit of the run, of which its code must hear."""
        return self._answer()

    async def reset(self) -> Observation:
        return await self._bridge.reset()

    async def step(self, turn: Turn) -> Observation | Done:
        following = await self._bridge.step(turn)
        if isinstance(following, Done):
            self._ended = await self._end()
        return following

    async def close(self) -> None:
        await self._bridge.close()

    async def _run(self, client: Any) -> Any:
        clients = importlib.import_module("verifiers.clients")
        return await self._environment.rollout(self._row, clients.OpenAIChatCompletionsClient(client), MODEL, {})

    async def _answer(self) -> Ended:
        if self._ended is None:
            if self._bridge.open:
                await self._bridge.cut()
            self._ended = await self._end()
        return self._ended

    async def _end(self) -> Ended:
        """What is to be scored. Raises RolloutFailed for what must not be: a rollout that ended by an error."""
        state = self._bridge.result()
        error = state.get("error")
        if error is not None:
            cause = error.__cause__ or error
            raise RolloutFailed(f"environment ended by an error ({reason(cause)})") from cause
        # Neither leaves the process: the client, and books of tokens that nobody reports to them.
        for name in ("client", "usage_tracker", "usage"):
            state.pop(name, None)
        try:
            return Ended(pickle.dumps(state))
        except (pickle.PicklingError, AttributeError, TypeError, ValueError, NotImplementedError) as unpicklable:
            log.debug("a state is scored in this process: %s", reason(unpicklable))
            return Ended(reward=await rewarded(self._environment, state))


async def rewarded(environment: Any, state: Any) -> float:
    """What the rubric says of a finished rollout."""
    rubric = environment.rubric
    if environment.score_rollouts:
        await rubric.score_rollout(state)
    else:
        await rubric.dummy_score_rollout(state)
    await rubric.cleanup(state)
    return float(state["reward"])


def load(name: str, args: dict[str, Any]) -> Any:
    """The environment of this name. Raises EnvironmentLoadError."""
    package = _package()
    try:
        with _own_signals():
            if ":" in name:
                own = load_function(name, f"verifiers: environment = {name!r}", EnvironmentLoadError)(**args)
            else:
                own = package.load_environment(name, **args)
    except EnvironmentLoadError:
        raise
    except Exception as error:
        cause = error.__cause__ or error
        raise EnvironmentLoadError(
            f"verifiers: environment = {name!r} does not load with args {args} ({reason(cause)})"
        ) from error
    if not isinstance(own, package.Environment):
        raise EnvironmentLoadError(f"verifiers: environment = {name!r} is {type(own).__name__}, not an Environment")
    if own.requires_group_rollouts:
        raise EnvironmentLoadError(
            f"verifiers: environment = {name!r} rewards rollouts relative to each other, which is not supported; "
            f"use its rollouts with a reward of your own for groups"
        )
    return own


def _package() -> Any:
    try:
        package: Any = importlib.import_module("verifiers")
        importlib.import_module("verifiers.clients")
    except ImportError as error:
        raise EnvironmentLoadError(
            f"environment 'verifiers' needs version 0.3 of the package verifiers ({error}): "
            f"pip install 'headrace[verifiers]'"
        ) from error
    return package


@contextmanager
def _own_signals() -> Iterator[None]:
    """Environments of verifiers take SIGINT and SIGTERM for themselves; a service needs them to drain."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _once(environment: Any) -> Any:
    """Its teardown, which it also calls itself as the process ends, made to do something once only."""
    original, done = environment._teardown, False

    async def teardown() -> None:
        nonlocal done
        if not done:
            done = True
            await original()

    environment._teardown = teardown
    return teardown
