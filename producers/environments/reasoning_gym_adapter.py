"""The procedural datasets of the package reasoning_gym (https://github.com/open-thought/reasoning-gym).

Some take a second for a question. In a producer they are made in a thread of their own, so that nobody waits for one
but the episodes that ask it.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from headrace.errors import EnvironmentLoadError
from producers.environments.api import Done, Observation, Rollout, Turn
from producers.environments.pass_rates import Band, kept, read_pass_rates
from producers.environments.reasoning_gym_datasets import Level, make_dataset, score
from producers.environments.single_turn import SingleTurn

EVAL_SEED_OFFSET = 1_000_003
RECENT = 256
"""Entries that are kept."""


class ReasoningGym:
    """Questions of one dataset; the reward is what its `score_answer` says, right is a score of 1.

    With several levels of its curriculum, question i is of level i modulo their number. The eval split is drawn with
    another seed, and questions that training has too are left out.
    """

    def __init__(
        self,
        *,
        dataset: str,
        size: int = 1000,
        eval_size: int = 100,
        seed: int = 0,
        prompt: str = "{question}",
        answer_tag: str = "",
        curriculum: Level | Sequence[Level] | None = None,
        datasets: Sequence[Mapping[str, Any]] = (),
        pass_rates: str = "",
        pass_rate: Sequence[float] = (0.0, 1.0),
        unmeasured: str = "keep",
        **options: Any,
    ) -> None:
        """`options` are the dataset's own. With `answer_tag` the answer is what stands in the last `<tag>…</tag>`.

        `curriculum` is a level, or a list of levels; `datasets` are the parts of the dataset "composite". With
        `pass_rates` the questions outside of `pass_rate` are left out; of several levels, those levels.
        Raises EnvironmentLoadError for a missing package, an unknown dataset, or an option that it refuses.
        """
        if "{question}" not in prompt:
            raise EnvironmentLoadError(f"reasoning_gym: prompt = {prompt!r} has no place for {{question}}")
        if size < 1 or eval_size < 0:
            raise EnvironmentLoadError(f"reasoning_gym: size = {size} and eval_size = {eval_size} must be positive")
        levels: list[Any] = list(curriculum) if isinstance(curriculum, list | tuple) else [curriculum]
        if not levels or len(levels) > size:
            raise EnvironmentLoadError(f"reasoning_gym: curriculum = {levels} is not from 1 to size = {size} levels")
        self._name, self._prompt = dataset, prompt

        def part(seed: int, size: int) -> Questions:
            each = -(-size // len(levels))
            made = [
                make_dataset(dataset, seed=seed, size=each, curriculum=level, parts=datasets, **options)
                for level in levels
            ]
            return Questions(made, size)

        self._train = part(seed, size)
        self._eval = part(seed + EVAL_SEED_OFFSET, max(eval_size, 1))
        self._eval_size = eval_size
        self._chosen = self._choose(pass_rates, Band.of("reasoning_gym", pass_rate, unmeasured))
        tag = re.escape(answer_tag)
        self._tagged = re.compile(rf"<{tag}>(.*?)</{tag}>", re.DOTALL) if answer_tag else None
        # One at a time: members of a group ask for the same question, and a dataset need not bear two threads.
        self._thread = ThreadPoolExecutor(1, "reasoning-gym")
        self._over = threading.Event()

    async def setup(self) -> None:
        """Make the held-out questions now: the first evaluation would have to wait for them."""
        if self._eval_size:
            await asyncio.get_running_loop().run_in_executor(self._thread, lambda: self._held_out)

    def teardown(self) -> None:
        self._over.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def __len__(self) -> int:
        return len(self._chosen)

    def eval_size(self) -> int:
        return len(self._held_out) if self._eval_size else 0

    def episode(self, split: str, index: int, seed: int) -> Asked:
        def make() -> SingleTurn:
            entry = self._held_out[index] if split == "eval" else self._train[self._chosen[index]]
            return SingleTurn(self._prompt.replace("{question}", entry["question"]), entry)

        return Asked(make, self._thread)

    async def score(self, rollout: Rollout) -> float:
        return self._score(rollout)

    def correct(self, rollout: Rollout) -> bool:
        return self._score(rollout) >= 1.0

    def _score(self, rollout: Rollout) -> float:
        entry = rollout.answer
        return score(self._train.levels[entry.get("level", 0)], self._answer(rollout.completion), entry)

    def _choose(self, pass_rates: str, band: Band) -> Sequence[int]:
        """The training questions that are asked."""
        size, levels = len(self._train), len(self._train.levels)
        if not pass_rates:
            if band != Band(0.0, 1.0):
                raise EnvironmentLoadError("reasoning_gym: pass_rate and unmeasured need pass_rates")
            return range(size)
        # A level is judged as a whole, because its questions can be had by the thousand.
        of_level = (lambda index: index % levels) if levels > 1 else int
        chosen = kept(size, read_pass_rates(Path(pass_rates).expanduser(), size, of_level), band, of_level)
        if not chosen:
            raise EnvironmentLoadError(
                f"reasoning_gym: no question has a pass rate from {band.low:g} to {band.high:g}; "
                f"widen pass_rate, or name other levels"
            )
        return chosen

    @cached_property
    def _held_out(self) -> list[dict[str, Any]]:
        """Made once they are asked for: it takes one pass over the training questions."""
        seen: set[str] = set()
        kept: list[dict[str, Any]] = []
        for part in (self._train, self._eval):
            for entry in map(part.__getitem__, range(len(part))):
                if self._over.is_set():
                    raise EnvironmentLoadError("reasoning_gym: it was ended while its held-out questions were made")
                if part is self._eval and entry["question"] not in seen:
                    kept.append(entry)
                seen.add(entry["question"])
        if self._eval_size and not kept:
            raise EnvironmentLoadError(
                f"reasoning_gym: every question of the eval split of {self._name!r} stands in training too; "
                f"lower size, or choose options with more questions"
            )
        return kept

    def _answer(self, completion: str) -> str:
        if self._tagged is None:
            return completion.strip()
        found = self._tagged.findall(completion)
        return found[-1].strip() if found else ""


class Asked:
    """An episode of one turn whose question is made when it begins, in the thread for that."""

    def __init__(self, make: Callable[[], SingleTurn], thread: Executor) -> None:
        self._make, self._thread = make, thread

    @cached_property
    def _turn(self) -> SingleTurn:
        return self._make()

    @property
    def answer(self) -> Any:
        """The dataset's entry."""
        return self._turn.answer

    async def reset(self) -> Observation:
        turn = await asyncio.get_running_loop().run_in_executor(self._thread, lambda: self._turn)
        return await turn.reset()

    async def step(self, turn: Turn) -> Observation | Done:
        return Done()

    async def close(self) -> None:
        return None


class Questions:
    """Entries of one dataset on several levels, in turn; an entry of several says its level.

    Some take a second to make: those of the last groups are kept for their other members.
    """

    def __init__(self, levels: Sequence[Any], size: int) -> None:
        self.levels, self._size = levels, size
        self._recent = lru_cache(RECENT)(self._made)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._recent(index)

    def _made(self, index: int) -> dict[str, Any]:
        place, level = divmod(index, len(self.levels))
        entry: dict[str, Any] = self.levels[level][place]
        return entry if len(self.levels) == 1 else {**entry, "level": level}
