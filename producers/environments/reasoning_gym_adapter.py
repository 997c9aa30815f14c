"""The procedural datasets of the package reasoning_gym (https://github.com/open-thought/reasoning-gym)."""

from __future__ import annotations

import importlib
import re
import sys
from functools import cached_property
from types import ModuleType
from typing import Any

from headrace.errors import EnvironmentLoadError
from producers.environments.api import Rollout
from producers.environments.single_turn import SingleTurn

EVAL_SEED_OFFSET = 1_000_003
COMPILED = "pycosat"
"""A C extension without wheels, which only the dataset zebra_puzzles calls."""


class ReasoningGym:
    """Questions of one dataset; the reward is what its `score_answer` says, right is a score of 1.

    The eval split is drawn with another seed, and questions that training has too are left out.
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
        **options: Any,
    ) -> None:
        """`options` are the dataset's own. With `answer_tag` the answer is what stands in the last `<tag>…</tag>`.

        Raises EnvironmentLoadError for a missing package, an unknown dataset, or an option that it refuses.
        """
        if "{question}" not in prompt:
            raise EnvironmentLoadError(f"reasoning_gym: prompt = {prompt!r} has no place for {{question}}")
        if size < 1 or eval_size < 0:
            raise EnvironmentLoadError(f"reasoning_gym: size = {size} and eval_size = {eval_size} must be positive")
        self._name, self._prompt = dataset, prompt
        self._train = make_dataset(dataset, seed=seed, size=size, **options)
        self._eval = make_dataset(dataset, seed=seed + EVAL_SEED_OFFSET, size=max(eval_size, 1), **options)
        self._eval_size = eval_size
        tag = re.escape(answer_tag)
        self._tagged = re.compile(rf"<{tag}>(.*?)</{tag}>", re.DOTALL) if answer_tag else None

    def __len__(self) -> int:
        return len(self._train)

    def eval_size(self) -> int:
        return len(self._held_out) if self._eval_size else 0

    def episode(self, split: str, index: int, seed: int) -> SingleTurn:
        entry = self._held_out[index] if split == "eval" else self._train[index]
        return SingleTurn(self._prompt.replace("{question}", entry["question"]), entry)

    async def score(self, rollout: Rollout) -> float:
        return float(self._train.score_answer(self._answer(rollout.completion), rollout.answer))

    def correct(self, rollout: Rollout) -> bool:
        return float(self._train.score_answer(self._answer(rollout.completion), rollout.answer)) >= 1.0

    @cached_property
    def _held_out(self) -> list[dict[str, Any]]:
        """Made when an evaluation asks for it: it takes one pass over the training questions."""
        seen = {entry["question"] for entry in self._train}
        kept: list[dict[str, Any]] = []
        for entry in self._eval:
            if entry["question"] not in seen:
                seen.add(entry["question"])
                kept.append(entry)
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


def make_dataset(name: str, **options: Any) -> Any:
    """A dataset of the package. Raises EnvironmentLoadError."""
    gym = import_package()
    known = importlib.import_module("reasoning_gym.factory").DATASETS
    if name not in known:
        raise EnvironmentLoadError(f"reasoning_gym: dataset = {name!r} is not one of its {len(known)} datasets")
    if name == "zebra_puzzles" and not hasattr(sys.modules[COMPILED], "itersolve"):
        raise EnvironmentLoadError(f"reasoning_gym: dataset = {name!r} needs {COMPILED}: pip install {COMPILED}")
    try:
        return gym.create_dataset(name, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise EnvironmentLoadError(f"reasoning_gym: dataset {name!r} refuses its options: {error}") from error


def import_package() -> ModuleType:
    """The package, also where its compiled requirement is missing. Raises EnvironmentLoadError without the package."""
    try:
        importlib.import_module(COMPILED)
    except ImportError:
        # Without a C compiler it cannot be installed. An empty module lets everything that does not call it import.
        sys.modules[COMPILED] = ModuleType(COMPILED)
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise EnvironmentLoadError(
            f"environment 'reasoning_gym' needs a package that is not there ({error}): "
            f"pip install 'headrace[reasoning-gym]'"
        ) from error
