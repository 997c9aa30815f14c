"""A body of the wire as a person reads it: its fields where it is msgpack, else its first bytes in hex."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import msgpack
import numpy as np

from broker.codec import decode_flat
from broker.flat import FlatGroup, sampled_runs
from broker.validate import LOGPROB_SLACK
from deploy.printable import printable
from headrace.errors import WireError
from headrace.version import PolicyVersion

SHOWN_BYTES = 256
"""Of a body that cannot be read."""
ROW = 16
LONGEST_VALUE = 200
MOST_FIELDS = 100
"""Of a foreign body; ours have about twenty."""


def describe(source: str, body: bytes) -> list[str]:
    """Its fields, one line each, and what its numbers are like; empty for what is no body of ours."""
    lines = []
    try:
        for line in _fields(body):
            lines.append(line)
    # Besides its own errors, msgpack raises what Python does for text that is not UTF-8, or keys that cannot be.
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        return [*lines, f"… no more can be read ({type(error).__name__})"] if len(lines) > 1 else []
    if source == "groups":
        try:
            lines += _figures(decode_flat(body))
        except WireError as error:
            lines.append(printable(str(error)))
    return lines


def hex_lines(body: bytes) -> list[str]:
    """The first bytes, as `hexdump -C` shows them."""
    shown = body[:SHOWN_BYTES]
    lines = []
    for start in range(0, len(shown), ROW):
        row = shown[start : start + ROW]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{start:08x}  {row.hex(' '):{3 * ROW - 1}}  |{text}|")
    if len(body) > len(shown):
        lines.append(f"… {len(body) - len(shown):,} more bytes; --output FILE writes all that were kept")
    return lines


def _fields(body: bytes) -> Iterator[str]:
    """Also of a body that is cut, as far as it goes."""
    reader = msgpack.Unpacker(strict_map_key=False, max_buffer_size=len(body))
    reader.feed(body)
    if reader.read_array_header() != 2:
        raise ValueError("not [schema, fields]")
    yield f"schema {_value(reader.unpack())}"
    number = reader.read_map_header()
    for _ in range(min(number, MOST_FIELDS)):
        name, value = reader.unpack(), reader.unpack()
        yield f"{printable(str(name))[:40]:12} {_value(value)}"
    if number > MOST_FIELDS:
        yield f"… {number - MOST_FIELDS:,} more fields"


def _value(value: Any) -> str:
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    text = printable(repr(value) if not isinstance(value, str) else value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


def _figures(flat: FlatGroup) -> Iterator[str]:
    """Ranges of the arrays: where a number is not what it should be, it is seen here."""
    lengths = ", ".join(str(length) for length in flat.lengths_N[:16])
    yield f"{len(flat.lengths_N)} trajectories of {lengths or 'no'} tokens"
    named = {"token ids": flat.token_ids_T, "log-probs": flat.logprobs_M, "rewards": np.asarray(flat.rewards_N)}
    for name, array in named.items():
        if len(finite := array[np.isfinite(array)]):
            yield f"{len(array):,} {name} from {finite.min():.6g} to {finite.max():.6g}"
    for number in np.flatnonzero(~(np.isfinite(flat.logprobs_M) & (flat.logprobs_M <= LOGPROB_SLACK)))[:1].tolist():
        yield f"log-prob number {number}{_place(flat, number)} is {flat.logprobs_M[number]:.6g}"
    spans_S5 = np.asarray(flat.spans_5S, np.int64).reshape(-1, 5)
    versions = [PolicyVersion(*row) for row in np.unique(spans_S5[:, 2:4], axis=0).tolist()]
    if versions:
        yield f"sampled by versions {', '.join(map(str, versions[:16]))}"


def _place(flat: FlatGroup, number: int) -> str:
    """Where a sampled token stands; empty where mask and lengths do not say it."""
    place = None
    for start, end in sampled_runs(flat.mask_runs_R):
        if number < end - start:
            place = start + number
            break
        number -= end - start
    for member, (start, end) in enumerate(pairwise(accumulate(flat.lengths_N, initial=0))):
        if place is not None and start <= place < end:
            return f" (token {place - start} of trajectory {member})"
    return ""
