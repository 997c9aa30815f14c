"""What `headrace portability measure` records of an engine on a target, as a JSON file, and how it is read again."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from audit.portability_rates import PARTS, Piece, ended, in_flight, part_rates
from headrace.errors import ConfigError
from producers.engines.traits import Traits

FORMAT = "headrace portability"
VERSION = 1
LARGEST_FILE = 1 << 24
"""Bytes; a record has some thousands."""
ROUNDED = 1e-6
"""Relative difference between a rate and the mean of its parts that writing them in decimal explains."""

Count = Annotated[int, msgspec.Meta(ge=1)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class Rate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one completion length at one batch size."""

    completion_tokens: Count
    """Asked for, of each completion."""
    batch: Count
    """Requests that were open at any time; each was followed by the next the moment it ended."""
    seconds: Positive
    tokens_per_s: Positive
    """Sampled tokens; the time includes the computation of the prompts."""
    parts_tokens_per_s: Annotated[list[Amount], msgspec.Meta(min_length=PARTS, max_length=PARTS)]
    """The same of equal parts of the time, in order."""
    in_flight: Positive
    """Completions that had a slot of the engine at once, on average."""
    completions: Annotated[int, msgspec.Meta(ge=0)]
    """That ended within the time."""
    completion_s: Positive
    """Seconds that a completion had a slot, on average."""
    mean_tokens: Positive
    """Of a completion."""

    @property
    def first(self) -> float:
        return self.parts_tokens_per_s[0]

    @property
    def last(self) -> float:
        return self.parts_tokens_per_s[-1]

    @property
    def kept(self) -> float | None:
        """The last part's rate over the first's; None where a part is shorter than a completion, and tells nothing."""
        told = self.seconds / len(self.parts_tokens_per_s) >= self.completion_s and self.first > 0
        return self.last / self.first if told else None


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    version: int
    made: str
    """UTC, ISO 8601."""
    label: str
    """What a comparison calls it."""
    host: str
    engine: str
    """The name of the engine in the configuration."""
    model: str
    prompt_tokens: Count
    traits: Traits
    single: list[Rate]
    """One request alone, for each completion length."""
    sustained: list[Rate]

    def alone(self, completion_tokens: int) -> Rate | None:
        """The single-request figure of a completion length."""
        return next((rate for rate in self.single if rate.completion_tokens == completion_tokens), None)


def rate_of(pieces: Sequence[Piece], begin: float, end: float, *, completion_tokens: int, batch: int) -> Rate | None:
    """Of what was decoded between two moments; None where nothing was."""
    parts = part_rates(pieces, begin, end)
    overlapping = [piece for piece in pieces if piece.within(begin, end) > 0]
    if not any(parts):
        return None
    return Rate(
        completion_tokens=completion_tokens,
        batch=batch,
        seconds=end - begin,
        tokens_per_s=statistics.fmean(parts),
        parts_tokens_per_s=parts,
        in_flight=in_flight(pieces, begin, end),
        completions=len(ended(pieces, begin, end)),
        completion_s=statistics.fmean(piece.end - piece.begin for piece in overlapping),
        mean_tokens=statistics.fmean(piece.tokens for piece in overlapping),
    )


def to_json(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(record)
    return found


class _Head(msgspec.Struct):
    """Of any version."""

    format: str
    version: int


def read_record(file: Path) -> Record:
    """Raises ConfigError, with what is wrong, for what is no record, is of another version, or was damaged."""
    data = _read(file)
    try:
        head = msgspec.json.decode(data, type=_Head)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is no record of `headrace portability measure`: {error}") from error
    if head.format != FORMAT:
        raise ConfigError(f"{file} is no record of `headrace portability measure`: its format is {head.format!r}")
    if head.version != VERSION:
        raise ConfigError(
            f"{file} is a record of version {head.version}, and this headrace reads version {VERSION}; measure again"
        )
    try:
        record = msgspec.json.decode(data, type=Record)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file} is damaged: {error}; measure again") from error
    if fault := _fault(record):
        raise ConfigError(f"{file} is damaged: {fault}; measure again")
    return record


def _read(file: Path) -> bytes:
    try:
        if file.exists() and not file.is_file():
            raise ConfigError(f"{file} is no file; name a record of `headrace portability measure`")
        if file.stat().st_size > LARGEST_FILE:
            raise ConfigError(f"{file} is no record of `headrace portability measure`: it has more than 16 MiB")
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error


def _fault(record: Record) -> str:
    """What does not fit together; "" where all does."""
    if not record.sustained:
        return "it has no sustained rate"
    if not all(text.isprintable() for text in _texts(to_json(record))):
        return "it holds what no terminal shows"
    for rate in (*record.single, *record.sustained):
        where = f"{rate.completion_tokens} tokens at batch {rate.batch}"
        mean = statistics.fmean(rate.parts_tokens_per_s)
        if not math.isclose(rate.tokens_per_s, mean, rel_tol=ROUNDED):
            return f"for {where} it says {rate.tokens_per_s:g} tokens/s, and its parts make {mean:g}"
    keys = [(rate.completion_tokens, rate.batch) for rate in record.sustained]
    if len(set(keys)) < len(keys):
        return "a completion length stands twice with the same batch size"
    return ""


def _texts(tree: Any) -> Iterator[str]:
    """All that are in it."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts(value)
