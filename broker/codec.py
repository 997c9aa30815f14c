"""Messages to bytes and back: msgpack, arrays as raw little-endian bytes, schema number first, no pickle.

Every body is `[schema, {...}]`. Token ids take the narrowest unsigned integer that holds the vocabulary;
log-probs are float32 and only of sampled tokens; loss masks and versions go as runs. A decoder raises WireError
with what is wrong; whether the numbers make sense is asked in `broker/validate.py`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt

from broker.flat import FlatGroup, flatten, unflatten
from broker.messages import SCHEMA, Group, StepEntry, StepRecord, Task
from broker.validate import Limits, check_flat
from headrace.errors import WireError
from headrace.version import PolicyVersion

T = TypeVar("T")

MAX_FEW = 1 << 20
"""Mask runs, spans and the like of one group: they are unpacked one by one."""

_HEAD = b"\x92" + msgpack.packb(SCHEMA)
"""A list of two, of which the first is the schema."""
_MAP16, _BIN32 = 0xDE, 0xC6
"""Of msgpack: a map with its count in two bytes, bytes with their length in four."""
_ID_DTYPES = ("<u1", "<u2", "<u4", "<i4")
_KINDS = ("train", "eval")
_OUTCOMES = ("played", "failed", "stale")
_VERDICTS = ("trained", "stale", "filtered", "failed", "dead", "superseded", "lost", "evaluated")


def encode_task(task: Task) -> bytes:
    return _pack(
        {
            "task": task.task_id,
            "kind": task.kind,
            "env": task.environment,
            "index": task.index,
            "seed": task.seed,
            "size": task.group_size,
            "min": list(task.min_version),
            "deadline": task.deadline_ms,
            "step": task.admitted_step,
        }
    )


def decode_task(body: bytes) -> Task:
    fields = _unpack(body, "task")
    incarnation, step = _ints(fields, "min", 2)
    return Task(
        task_id=_text(fields, "task"),
        kind=_choice(fields, "kind", _KINDS),
        environment=_text(fields, "env"),
        index=_int(fields, "index"),
        seed=_int(fields, "seed"),
        group_size=_int(fields, "size"),
        min_version=PolicyVersion(incarnation, step),
        deadline_ms=_int(fields, "deadline"),
        admitted_step=_int(fields, "step"),
    )


def encode_group(group: Group, vocab_size: int) -> bytes:
    """Raises WireError when arrays of one trajectory differ in length."""
    flat = flatten(group)
    dtype = _id_dtype(flat.token_ids_T, vocab_size)
    fields = {
        "task": flat.task_id,
        "attempt": flat.attempt,
        "kind": flat.kind,
        "env": flat.environment,
        "index": flat.index,
        "producer": flat.producer,
        "failures": flat.failures,
        "outcome": flat.outcome,
        "error": flat.error,
        "stopped": flat.stopped_N,
        "seconds": flat.seconds,
        "dtype": dtype,
        "lengths": _u4(flat.lengths_N),
        "mask": _u4(flat.mask_runs_R),
        "span_counts": _u4(flat.span_counts_N),
        "spans": _u4(flat.spans_5S),
        "rewards": np.array(flat.rewards_N, "<f8").tobytes(),
        "finish": bytes(flat.finish_N),
        "correct": bytes(flat.correct_N),
    }
    ids, logprobs = flat.token_ids_T.astype(dtype), flat.logprobs_M.astype("<f4", copy=False)
    return _pack_with(fields, {"ids": ids, "logprobs": logprobs})


def decode_flat(body: bytes) -> FlatGroup:
    """The arrays of a group, not yet validated."""
    fields = _unpack(body, "group")
    dtype = _choice(fields, "dtype", _ID_DTYPES)
    spans = _few(fields, "spans", "I")
    if len(spans) % 5:
        raise WireError(f"group: field 'spans' holds {len(spans)} numbers, which is no multiple of 5")
    return FlatGroup(
        task_id=_text(fields, "task"),
        attempt=_int(fields, "attempt"),
        kind=_choice(fields, "kind", _KINDS),
        environment=_text(fields, "env"),
        index=_int(fields, "index"),
        producer=_text(fields, "producer"),
        failures=tuple(_texts(fields, "failures")),
        outcome=_choice(fields, "outcome", _OUTCOMES),
        error=_text(fields, "error"),
        stopped_N=tuple(_numbers(fields, "stopped")),
        seconds=_seconds(fields),
        token_ids_T=_array(fields, "ids", dtype),
        logprobs_M=_array(fields, "logprobs", "<f4").astype(np.float32, copy=False),
        lengths_N=_few(fields, "lengths", "I"),
        mask_runs_R=_few(fields, "mask", "I"),
        span_counts_N=_few(fields, "span_counts", "I"),
        spans_5S=spans,
        rewards_N=_few(fields, "rewards", "d"),
        finish_N=_few(fields, "finish", "B"),
        correct_N=_few(fields, "correct", "B"),
    )


def decode_group(body: bytes, limits: Limits) -> Group:
    """Decode and validate. Raises WireError with the reason."""
    flat = decode_flat(body)
    if reason := check_flat(flat, limits):
        raise WireError(reason)
    return unflatten(flat)


def encode_step(record: StepRecord) -> bytes:
    entries = [[entry.entry_id, entry.task_id, entry.verdict, entry.reason] for entry in record.entries]
    return _pack({"version": list(record.version), "entries": entries})


def decode_step(body: bytes) -> StepRecord:
    fields = _unpack(body, "step")
    incarnation, step = _ints(fields, "version", 2)
    rows = _field(fields, "entries", list, "step")
    entries = []
    for row in rows:
        if not (isinstance(row, list) and len(row) == 4 and all(isinstance(text, str) for text in row)):
            raise WireError("step: an entry is not [entry, task, verdict, reason]")
        if row[2] not in _VERDICTS:
            raise WireError(f"step: unknown verdict {row[2]!r}")
        entries.append(StepEntry(*row))
    return StepRecord(PolicyVersion(incarnation, step), tuple(entries))


def _pack(fields: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb([SCHEMA, fields])
    return packed


def _pack_with(fields: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> bytes:
    """As `_pack` of both, but the arrays' bytes are copied once only, into the result."""
    packed = msgpack.packb(fields)
    count = struct.pack(">BH", _MAP16, len(fields) + len(arrays))
    parts = [_HEAD, count, memoryview(packed)[3 if packed[0] == _MAP16 else 1 :]]
    for name, array in arrays.items():
        parts += (msgpack.packb(name), struct.pack(">BI", _BIN32, array.nbytes), array.data)
    return b"".join(parts)


def _unpack(body: bytes, what: str) -> dict[str, Any]:
    try:
        message = msgpack.unpackb(body, strict_map_key=True)
    # Besides its own errors, msgpack raises what Python does for text that is not UTF-8 or nested too deep.
    except (ValueError, msgpack.UnpackException, struct.error, RecursionError) as error:
        raise WireError(f"{what}: the body is not msgpack ({type(error).__name__})") from error
    if not isinstance(message, list) or len(message) != 2:
        raise WireError(f"{what}: the body is not [schema, fields]")
    schema, fields = message
    if schema != SCHEMA:
        raise WireError(f"{what}: schema {str(schema)[:20]}, but this process speaks {SCHEMA}")
    if not isinstance(fields, dict):
        raise WireError(f"{what}: the fields are not a map")
    return fields


def _id_dtype(ids_T: npt.NDArray[np.int32], vocab_size: int) -> str:
    """The narrowest that holds the vocabulary, and any id that is wrongly outside: the receiver sees it as it is."""
    low, high = (int(ids_T.min()), int(ids_T.max())) if len(ids_T) else (0, 0)
    if low < 0:
        return "<i4"
    return str(np.min_scalar_type(max(vocab_size - 1, high)).newbyteorder("<").str).replace("|", "<")


def _field(fields: dict[str, Any], name: str, kind: type[T], what: str = "body") -> T:
    value = fields.get(name)
    if type(value) is not kind:
        raise WireError(f"{what}: field {name!r} is {type(value).__name__}, not {kind.__name__}")
    return value


def _text(fields: dict[str, Any], name: str) -> str:
    return _field(fields, name, str)


def _int(fields: dict[str, Any], name: str) -> int:
    return _field(fields, name, int)


def _choice(fields: dict[str, Any], name: str, allowed: tuple[str, ...]) -> Any:
    value = _field(fields, name, str)
    if value not in allowed:
        raise WireError(f"body: field {name!r} is {value[:40]!r}, not one of {', '.join(allowed)}")
    return value


def _each(fields: dict[str, Any], name: str, kind: type) -> list[Any]:
    values = _field(fields, name, list)
    if any(type(value) is not kind for value in values):
        raise WireError(f"body: field {name!r} holds something of another type")
    return values


def _texts(fields: dict[str, Any], name: str) -> list[str]:
    return _each(fields, name, str)


def _numbers(fields: dict[str, Any], name: str) -> list[int]:
    return _each(fields, name, int)


def _ints(fields: dict[str, Any], name: str, count: int) -> list[int]:
    values = _numbers(fields, name)
    if len(values) != count:
        raise WireError(f"body: field {name!r} holds {len(values)} numbers, not {count}")
    return values


def _seconds(fields: dict[str, Any]) -> dict[str, float]:
    seconds = _field(fields, "seconds", dict)
    for name, value in seconds.items():
        if not (isinstance(name, str) and isinstance(value, int | float) and math.isfinite(value)):
            raise WireError("body: field 'seconds' is not a map from names to finite numbers")
    return {name: float(value) for name, value in seconds.items()}


def _u4(numbers: Sequence[int]) -> bytes:
    """A number outside its range is wrapped: what is there is then out of every bound, which the receiver sees."""
    return np.array(numbers, np.int64).astype("<u4").tobytes()


def _few(fields: dict[str, Any], name: str, code: str) -> tuple[Any, ...]:
    """Numbers of which a group has few, by their code in `struct`."""
    raw, size = _whole(fields, name, struct.calcsize(f"<{code}"))
    count = len(raw) // size
    if count > MAX_FEW:
        raise WireError(f"body: field {name!r} holds {count} numbers, more than {MAX_FEW}")
    return struct.unpack(f"<{count}{code}", raw)


def _array(fields: dict[str, Any], name: str, dtype: str) -> npt.NDArray[Any]:
    raw, _ = _whole(fields, name, np.dtype(dtype).itemsize)
    return np.frombuffer(raw, dtype)


def _whole(fields: dict[str, Any], name: str, size: int) -> tuple[bytes, int]:
    """The bytes of an array, and those of one number."""
    raw = _field(fields, name, bytes)
    if len(raw) % size:
        raise WireError(f"body: field {name!r} has {len(raw)} bytes, which is no multiple of {size}")
    return raw, size
