"""Prompts and answers of a data set: JSON lines, Parquet, or what the package `datasets` loads.

The order is the trainer's: it goes through all indices in an order shuffled anew in every epoch, known from the run's
seed alone (`consumers/curriculum.py`). Here an index is a row, less the held-out ones and those whose measured pass
rate is not wanted.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from headrace.errors import EnvironmentLoadError
from producers.environments.api import Rollout
from producers.environments.calls import RolloutFailed
from producers.environments.columns import BadRow, Columns, Shown
from producers.environments.judging import Judging
from producers.environments.pass_rates import Band, kept, read_pass_rates
from producers.environments.rows import Rows, open_rows

HELD_OUT_SEED = 24
"""The held-out rows are the same in every process and every run."""


class Dataset:
    """One row, one prompt, one completion. The reward is 1 for a right answer and 0 for a wrong one."""

    def __init__(
        self,
        *,
        data: str | Sequence[str],
        split: str = "train",
        config: str = "",
        revision: str = "",
        prompt: str = "{prompt}",
        messages: str = "",
        system: str = "",
        answer: str = "answer",
        answer_after: str = "",
        match: str = "exact",
        answer_tag: str = "",
        held_out: float = 0,
        eval_data: str | Sequence[str] = "",
        eval_split: str = "",
        pass_rates: str = "",
        pass_rate_column: str = "",
        pass_rate: Sequence[float] = (0.0, 1.0),
        unmeasured: str = "keep",
    ) -> None:
        """`docs/datasets.md` says what each is. Raises EnvironmentLoadError for one that cannot be.

        The rows are read when they are first asked for, because the processes that score need none.
        """
        self._columns = Columns(prompt, messages, system, answer, answer_after)
        self._judging = Judging(match, answer_tag, needs_answer=bool(answer))
        self._band = Band.of("dataset", pass_rate, unmeasured)
        self._pass_rates, self._pass_rate_column = pass_rates, pass_rate_column
        if pass_rates and pass_rate_column:
            raise EnvironmentLoadError("dataset: pass_rates and pass_rate_column are two ways to say it; name one")
        if not (pass_rates or pass_rate_column) and self._band != Band(0.0, 1.0):
            raise EnvironmentLoadError("dataset: pass_rate and unmeasured need pass_rates or pass_rate_column")
        if held_out < 0 or (held_out != int(held_out) and held_out > 1):
            raise EnvironmentLoadError(
                f"dataset: held_out = {held_out} is neither a number of rows nor a share below 1"
            )
        if held_out and (eval_data or eval_split):
            raise EnvironmentLoadError("dataset: held_out and eval_data or eval_split exclude each other; name one")
        self._held_out = held_out
        self._source = (data, split, config, revision)
        self._eval_source = (eval_data or data, eval_split or split, config, revision)
        self._has_eval_source = bool(eval_data or eval_split)

    async def setup(self) -> None:
        """Read now, beside the event loop, what the first episode would have to wait for."""
        await asyncio.to_thread(lambda: (self._train, self._eval))

    def __len__(self) -> int:
        return len(self._train)

    def eval_size(self) -> int:
        return len(self._eval)

    def episode(self, split: str, index: int, seed: int) -> Shown:
        """The seed does not matter: the index says it all. Raises RolloutFailed for a row that cannot be shown."""
        part = self._eval if split == "eval" else self._train
        try:
            return self._columns.episode(part[index])
        except BadRow as error:
            raise RolloutFailed(f"{part.place(index)}: {error}") from error
        except EnvironmentLoadError as error:  # the file is another one than when it was checked
            raise RolloutFailed(str(error)) from error

    async def score(self, rollout: Rollout) -> float:
        return float(self._judging.right(rollout))

    def correct(self, rollout: Rollout) -> bool:
        return self._judging.right(rollout)

    @cached_property
    def _rows(self) -> Rows:
        return self._checked(*self._source, measured=self._pass_rate_column)

    @cached_property
    def _held(self) -> array[int]:
        """Numbers of the held-out rows, in order."""
        size = len(self._rows)
        count = round(size * self._held_out) if self._held_out < 1 else int(self._held_out)
        if self._held_out and not 0 < count < size:
            raise EnvironmentLoadError(
                f"dataset: held_out = {self._held_out} of {size} rows leaves none for training or for evaluation"
            )
        return array("Q", sorted(Random(HELD_OUT_SEED).sample(range(size), count)))

    @cached_property
    def _eval(self) -> Part:
        if self._has_eval_source:
            rows = self._checked(*self._eval_source, measured="")
            return Part(rows, range(len(rows)))
        return Part(self._rows, self._held)

    @cached_property
    def _train(self) -> Part:
        held = set(self._held)
        numbers = array("Q", (number for number in range(len(self._rows)) if number not in held))
        rates = self._measured(numbers)
        if rates is None:
            return Part(self._rows, numbers)
        wanted = kept(len(numbers), rates, self._band)
        if not wanted:
            raise EnvironmentLoadError(
                f"dataset: no prompt has a pass rate from {self._band.low:g} to {self._band.high:g}; "
                f"widen pass_rate, or measure again with the policy that is to be trained"
            )
        return Part(self._rows, array("Q", (numbers[index] for index in wanted)))

    def _measured(self, numbers: Sequence[int]) -> Mapping[int, float] | None:
        """Pass rates by training index; None where nothing says them."""
        if self._pass_rates:
            return read_pass_rates(Path(self._pass_rates).expanduser(), len(numbers))
        if not self._pass_rate_column:
            return None
        every = array("d", (self._columns.pass_rate(row, self._pass_rate_column) for row in self._rows.scan()))
        rates = ((index, every[number]) for index, number in enumerate(numbers))
        return {index: rate for index, rate in rates if not math.isnan(rate)}

    def _checked(self, data: str | Sequence[str], split: str, config: str, revision: str, *, measured: str) -> Rows:
        """`measured` is the column of pass rates. Raises EnvironmentLoadError for the first row that is no prompt."""
        rows = open_rows(data, split=split, config=config, revision=revision)
        if not len(rows):
            raise EnvironmentLoadError(f"dataset: data = {data!r} has no rows")
        for index, row in enumerate(rows.scan()):
            try:
                self._columns.episode(row)
                if measured:
                    self._columns.pass_rate(row, measured)
            except BadRow as error:
                raise EnvironmentLoadError(f"{rows.place(index)}: {error}") from error
        return rows


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the rows, by their numbers."""

    rows: Rows
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.rows[self.numbers[index]]

    def place(self, index: int) -> str:
        return self.rows.place(self.numbers[index])
