"""What the tests of rollouts share: an environment that chats, scores in this process, and what plays them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from broker.messages import Task
from headrace.config import SamplingConfig
from headrace.version import PolicyVersion
from producers.chat import ByteChat
from producers.engines.scripted import ScriptedEngine
from producers.environments.api import Done, Episode, Message, Observation, Rollout, Turn
from producers.environments.calls import Calls
from producers.group import Stage
from producers.rewards.worker import Score
from producers.rollout import Player

FIRST = PolicyVersion(1, 0)
TASK = Task("t1", "train", "chatty", 5, 77, 4, FIRST, 0)


class Chatty:
    """Answers every completion with "go on", until it has seen `turns`."""

    def __init__(self, turns: int, fault: Callable[[str], object] | None = None) -> None:
        self.turns, self.seen, self.fault, self.closed = turns, 0, fault or (lambda where: None), False

    answer = "the end"

    async def reset(self) -> Observation:
        self.fault("reset")
        return Observation((Message("user", "hello"),))

    async def step(self, turn: Turn) -> Observation | Done:
        self.fault("step")
        self.seen += 1
        return Done(0.5) if self.seen == self.turns else Observation((Message("user", "go on"),))

    async def close(self) -> None:
        self.closed = True


class Chats:
    """An environment that makes what `factory` makes."""

    def __init__(self, factory: Callable[[int, int], Episode], evals: int = 3) -> None:
        self.factory, self.evals = factory, evals
        self.made: list[tuple[str, int, int]] = []

    def __len__(self) -> int:
        return 4

    def eval_size(self) -> int:
        return self.evals

    def episode(self, split: str, index: int, seed: int) -> Episode:
        self.made.append((split, index, seed))
        return self.factory(index, seed)

    async def score(self, rollout: Rollout) -> float:
        return 1.0

    def correct(self, rollout: Rollout) -> bool:
        return True


class Scores:
    """Scores in this process: the given outcomes in turn, then 1."""

    def __init__(self, *scores: Score) -> None:
        self.scores, self.kinds = list(scores), list[str]()

    async def score(self, name: str, kind: str, rollout: Rollout) -> Score:
        self.kinds.append(kind)
        return self.scores.pop(0) if self.scores else Score(1.0)


def player(engine: ScriptedEngine, deadline_s: float = 5.0, **sampling: int) -> Player:
    return Player(engine, ByteChat(), SamplingConfig(**{"max_new_tokens": 16, **sampling}), Calls(deadline_s))


def stage(player: Player, environment: Chats, scorer: Scores, **more: object) -> Stage:
    return replace(Stage("p1", player, {"chatty": environment}, scorer, min_group_size=2), **more)
