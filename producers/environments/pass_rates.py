"""How often a policy solved each prompt: files of measured pass rates, and which prompts are left to train on.

A file is JSON lines, one object each: `{"index": 12, "pass_rate": 0.25, "samples": 8}`. `index` counts the training
prompts of the environment as it is without such a file, from 0. An index that stands there several times has the mean
of its samples, so that measurements may be appended to each other.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.errors import EnvironmentLoadError

LARGEST_SAMPLES = 1 << 32


class Measured(msgspec.Struct, frozen=True):
    """One line. Fields beside these are ignored."""

    index: int
    pass_rate: float
    samples: int = 1


@dataclass(frozen=True, slots=True)
class Band:
    """The pass rates that are wanted, both ends included."""

    low: float
    high: float
    unmeasured: bool = True
    """Whether prompts that nobody measured stay."""

    @classmethod
    def of(cls, what: str, given: Sequence[float], unmeasured: str) -> Band:
        """`what` begins the sentence. Raises EnvironmentLoadError for what is no band."""
        numbers = [rate for rate in given if isinstance(rate, int | float) and not isinstance(rate, bool)]
        if len(given) != 2 or len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1] <= 1:
            raise EnvironmentLoadError(
                f"{what}: pass_rate = {list(given)} is not a lower and an upper bound between 0 and 1"
            )
        if unmeasured not in ("keep", "drop"):
            raise EnvironmentLoadError(f"{what}: unmeasured = {unmeasured!r} is neither 'keep' nor 'drop'")
        return cls(float(given[0]), float(given[1]), unmeasured == "keep")

    def takes(self, rate: float | None) -> bool:
        """None: not measured."""
        return self.unmeasured if rate is None else self.low <= rate <= self.high


def read_pass_rates(file: Path, size: int, part: Callable[[int], int] = int) -> dict[int, float]:
    """The pass rate of each measured part of `size` prompts; `part` says whose an index is, by default its own.

    Raises EnvironmentLoadError, with file and line, for what is no such file, or of other data.
    """
    passed: dict[int, float] = {}
    samples: dict[int, int] = {}
    for line in _lines(file, size):
        key = part(line.index)
        passed[key] = passed.get(key, 0.0) + line.pass_rate * line.samples
        samples[key] = samples.get(key, 0) + line.samples
    return {key: passed[key] / samples[key] for key in passed}


def kept(size: int, rates: Mapping[int, float], band: Band, part: Callable[[int], int] = int) -> array[int]:
    """Which of `size` indices stay, in order."""
    return array("Q", (index for index in range(size) if band.takes(rates.get(part(index)))))


def write_pass_rates(file: Path, measured: Iterable[Measured]) -> None:
    """A new file of them, whole or not at all: what was there before stays until then. Raises OSError."""
    encode = msgspec.json.Encoder().encode
    text = b"".join(encode(line) + b"\n" for line in measured)
    if file.exists() and not file.is_file():  # a pipe, or a device
        file.write_bytes(text)
        return
    file = file.resolve()
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_bytes(text)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def _lines(file: Path, size: int) -> Iterable[Measured]:
    try:
        with file.open("rb") as lines:
            for number, text in enumerate(lines, 1):
                if text.strip():
                    yield _line(text, size, f"pass rates {file}, line {number}")
    except OSError as error:
        raise EnvironmentLoadError(f"pass rates {file} cannot be read ({error.strerror})") from error


def _line(text: bytes, size: int, place: str) -> Measured:
    try:
        line = msgspec.json.decode(text, type=Measured)
        _check(line, size)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors, too
        raise EnvironmentLoadError(f"{place}: {error}") from error
    return line


def _check(line: Measured, size: int) -> None:
    if not 0 <= line.index < size:
        raise ValueError(
            f"index {line.index} is not one of the {size} training prompts; were they measured with the same options?"
        )
    if not 0 <= line.pass_rate <= 1:
        raise ValueError(f"pass_rate {line.pass_rate} is not between 0 and 1")
    if not 1 <= line.samples <= LARGEST_SAMPLES:
        raise ValueError(f"samples {line.samples} is not a number of samples")
