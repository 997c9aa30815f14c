"""Messages to bytes and back: msgpack, arrays as raw little-endian bytes, schema number first, no pickle.

Every body is `[schema, {...}]`. Token ids take the narrowest unsigned integer that holds the vocabulary;
log-probs are float32 and only of sampled tokens; loss masks and versions go as runs. A decoder raises WireError
with what is wrong; whether the numbers make sense is asked in `broker/validate.py`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Sequence
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from broker.flat import FlatGroup, flatten, unflatten
from broker.messages import SCHEMA, Group, StepEntry, StepRecord, Task
from broker.validate import Limits, check_flat
from headrace.errors import WireError
from headrace.version import PolicyVersion

MAX_ID = 2**31 - 1
MAX_FEW = 1 << 20
"""Mask runs, spans and the like of one group: they are unpacked one by one."""

_HEAD = b"\x92" + msgpack.packb(SCHEMA)
"""A list of two, of which the first is the schema."""
_MAP16, _BIN32 = 0xDE, 0xC6
"""Of msgpack: a map with its count in two bytes, bytes with their length in four."""
_ID_DTYPES = {name: np.dtype(name) for name in ("<u1", "<u2", "<u4", "<i4")}
_KINDS = ("train", "eval")
_OUTCOMES = ("played", "failed", "stale")
_TASK: dict[str, type] = {
    **dict.fromkeys(("task", "kind", "env"), str),
    **dict.fromkeys(("index", "seed", "size", "deadline", "step"), int),
    "min": list,
}
_GROUP: dict[str, type] = {
    **dict.fromkeys(("task", "kind", "env", "producer", "outcome", "error", "dtype"), str),
    **dict.fromkeys(("attempt", "index"), int),
    **dict.fromkeys(("failures", "stopped"), list),
    "seconds": dict,
    **dict.fromkeys(("ids", "logprobs", "lengths", "mask", "span_counts", "spans"), bytes),
    **dict.fromkeys(("rewards", "finish", "correct"), bytes),
}
_STEP: dict[str, type] = {"version": list, "entries": list}
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
    fields = _unpack(body, "task", _TASK)
    incarnation, step = _pair(fields, "min")
    return Task(
        task_id=fields["task"],
        kind=_choice(fields, "kind", _KINDS),
        environment=fields["env"],
        index=fields["index"],
        seed=fields["seed"],
        group_size=fields["size"],
        min_version=PolicyVersion(incarnation, step),
        deadline_ms=fields["deadline"],
        admitted_step=fields["step"],
    )


def encode_group(group: Group, vocab_size: int) -> bytes:
    """Raises WireError when arrays of one trajectory differ in length."""
    flat = flatten(group)
    dtype = _id_dtype(flat.token_ids_T, vocab_size)
    ids, logprobs = flat.token_ids_T.astype(_ID_DTYPES[dtype]), flat.logprobs_M.astype("<f4", copy=False)
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
        "rewards": struct.pack(f"<{len(flat.rewards_N)}d", *flat.rewards_N),
        "finish": bytes(flat.finish_N),
        "correct": bytes(flat.correct_N),
    }
    return _pack_with(fields, {"ids": ids, "logprobs": logprobs})


def decode_flat(body: bytes) -> FlatGroup:
    """The arrays of a group, not yet validated."""
    fields = _unpack(body, "group", _GROUP)
    dtype = _ID_DTYPES[_choice(fields, "dtype", _ID_DTYPES)]
    spans = _numbers(fields, "spans", "I", 4)
    if len(spans) % 5:
        raise WireError(f"group: field 'spans' holds {len(spans)} numbers, which is no multiple of 5")
    return FlatGroup(
        task_id=fields["task"],
        attempt=fields["attempt"],
        kind=_choice(fields, "kind", _KINDS),
        environment=fields["env"],
        index=fields["index"],
        producer=fields["producer"],
        failures=_each(fields, "failures", str),
        outcome=_choice(fields, "outcome", _OUTCOMES),
        error=fields["error"],
        stopped_N=_each(fields, "stopped", int),
        seconds=_seconds(fields["seconds"]),
        lengths_N=_numbers(fields, "lengths", "I", 4),
        token_ids_T=np.frombuffer(_whole(fields, "ids", dtype.itemsize), dtype),
        logprobs_M=np.frombuffer(_whole(fields, "logprobs", 4), "<f4").astype(np.float32, copy=False),
        mask_runs_R=_numbers(fields, "mask", "I", 4),
        span_counts_N=_numbers(fields, "span_counts", "I", 4),
        spans_5S=spans,
        rewards_N=_numbers(fields, "rewards", "d", 8),
        finish_N=fields["finish"],
        correct_N=fields["correct"],
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
    fields = _unpack(body, "step", _STEP)
    incarnation, step = _pair(fields, "version")
    entries = []
    for row in fields["entries"]:
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


def _unpack(body: bytes, what: str, kinds: dict[str, type]) -> dict[str, Any]:
    """The fields of a body; those that `kinds` names are there, and of that type."""
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
    if [*map(type, map(fields.get, kinds))] != [*kinds.values()]:
        name = next(name for name, kind in kinds.items() if type(fields.get(name)) is not kind)
        found, wanted = type(fields.get(name)).__name__, kinds[name].__name__
        raise WireError(f"{what}: field {name!r} is {found}, not {wanted}")
    return fields


def _id_dtype(ids_T: npt.NDArray[Any], vocab_size: int) -> str:
    """The narrowest that holds the vocabulary, and any id that is wrongly outside: the receiver sees it as it is."""
    # Seen as unsigned, a negative one is the largest.
    high = int(ids_T.view(np.uint32).max()) if len(ids_T) else 0
    if high > MAX_ID:
        return "<i4"
    high = max(high, vocab_size - 1)
    return "<u1" if high < 1 << 8 else "<u2" if high < 1 << 16 else "<u4"


def _choice(fields: dict[str, Any], name: str, allowed: Collection[str]) -> Any:
    value = fields[name]
    if value not in allowed:
        raise WireError(f"body: field {name!r} is {value[:40]!r}, not one of {', '.join(allowed)}")
    return value


def _each(fields: dict[str, Any], name: str, kind: type) -> tuple[Any, ...]:
    values = fields[name]
    if values and {*map(type, values)} != {kind}:
        raise WireError(f"body: field {name!r} holds something of another type")
    return tuple(values)


def _pair(fields: dict[str, Any], name: str) -> tuple[int, int]:
    values = _each(fields, name, int)
    if len(values) != 2:
        raise WireError(f"body: field {name!r} holds {len(values)} numbers, not 2")
    return values[0], values[1]


def _seconds(seconds: dict[Any, Any]) -> dict[str, float]:
    kinds = {*map(type, seconds)} <= {str} and {*map(type, seconds.values())} <= {int, float}
    if not (kinds and all(map(math.isfinite, seconds.values()))):
        raise WireError("body: field 'seconds' is not a map from names to finite numbers")
    return dict(zip(seconds, map(float, seconds.values()), strict=True))


def _u4(numbers: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(numbers)}I", *numbers)
    except struct.error:
        # A number outside its range is wrapped; it is then out of every bound, which the receiver sees.
        return np.array(numbers, np.int64).astype("<u4").tobytes()


def _numbers(fields: dict[str, Any], name: str, code: str, size: int) -> tuple[Any, ...]:
    """Numbers of which a group has few, by their code in `struct`."""
    raw = _whole(fields, name, size)
    count = len(raw) // size
    if count > MAX_FEW:
        raise WireError(f"body: field {name!r} holds {count} numbers, more than {MAX_FEW}")
    return struct.unpack(f"<{count}{code}", raw)


def _whole(fields: dict[str, Any], name: str, size: int) -> bytes:
    """The bytes of an array whose numbers have `size` each."""
    raw: bytes = fields[name]
    if len(raw) % size:
        raise WireError(f"body: field {name!r} has {len(raw)} bytes, which is no multiple of {size}")
    return raw
