"""Messages to bytes and back: msgpack, arrays as raw little-endian bytes, schema number first, no pickle.

Every body is `[schema, {...}]`. Token ids take the narrowest unsigned integer that holds the vocabulary;
log-probs are float32 and only of sampled tokens; loss masks and versions go as runs. A decoder raises WireError
with what is wrong; whether the numbers make sense is asked in `broker/validate.py`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from broker.flat import FlatGroup, flatten, unflatten
from broker.messages import SCHEMA, Group, Schema, StepEntry, StepRecord, Task, TaskKind, Verdict
from broker.validate import Limits, check_flat
from headrace.errors import WireError
from headrace.version import PolicyVersion

T = TypeVar("T")

MAX_ID = 2**31 - 1
MAX_FEW = 1 << 20
"""Mask runs, spans and the like of one group: they are unpacked one by one."""

_ID_DTYPES = {name: np.dtype(name) for name in ("<u1", "<u2", "<u4", "<i4")}
_encode = msgspec.msgpack.Encoder().encode


class _Task(msgspec.Struct, gc=False):
    """The fields of a task's body."""

    task: str
    kind: TaskKind
    env: str
    index: int
    seed: int
    size: int
    min: tuple[int, int]
    deadline: int
    step: int


class _Group(msgspec.Struct, gc=False):
    """The fields of a group's body. The arrays are those of FlatGroup; u4 where no type is named."""

    task: str
    attempt: int
    kind: TaskKind
    env: str
    index: int
    producer: str
    failures: tuple[str, ...]
    outcome: Literal["played", "failed", "stale"]
    error: str
    stopped: tuple[int, ...]
    seconds: dict[str, float]
    dtype: Literal["<u1", "<u2", "<u4", "<i4"]
    """Of `ids`."""
    lengths: bytes
    mask: bytes
    span_counts: bytes
    spans: bytes
    rewards: bytes
    """f8."""
    finish: bytes
    """u1."""
    correct: bytes
    """u1."""
    ids: memoryview
    logprobs: memoryview
    """f4. These two are the large ones, and are read where they lie in the body."""


class _Step(msgspec.Struct, gc=False, omit_defaults=True):
    """The fields of a step record's body."""

    version: tuple[int, int]
    entries: list[tuple[str, str, Verdict, str]]
    restored: tuple[int, int] | None = None
    """Of a rollback only."""


_tasks = msgspec.msgpack.Decoder(tuple[Schema, _Task])
_groups = msgspec.msgpack.Decoder(tuple[Schema, _Group])
_steps = msgspec.msgpack.Decoder(tuple[Schema, _Step])


def encode_task(task: Task) -> bytes:
    fields = _Task(
        task=task.task_id,
        kind=task.kind,
        env=task.environment,
        index=task.index,
        seed=task.seed,
        size=task.group_size,
        min=task.min_version,
        deadline=task.deadline_ms,
        step=task.admitted_step,
    )
    return _encode((SCHEMA, fields))


def decode_task(body: bytes) -> Task:
    fields = _decode(_tasks, body, "task")
    return Task(
        task_id=fields.task,
        kind=fields.kind,
        environment=fields.env,
        index=fields.index,
        seed=fields.seed,
        group_size=fields.size,
        min_version=PolicyVersion(*fields.min),
        deadline_ms=fields.deadline,
        admitted_step=fields.step,
    )


def encode_group(group: Group, vocab_size: int) -> bytes:
    """Raises WireError when arrays of one trajectory differ in length."""
    flat = flatten(group)
    assert flat.outcome != "dead", "only the broker says that a group is dead"
    assert flat.outcome != "lost", "only the broker says that a group is lost"
    dtype = _id_dtype(flat.token_ids_T, vocab_size)
    fields = _Group(
        task=flat.task_id,
        attempt=flat.attempt,
        kind=flat.kind,
        env=flat.environment,
        index=flat.index,
        producer=flat.producer,
        failures=flat.failures,
        outcome=flat.outcome,
        error=flat.error,
        stopped=flat.stopped_N,
        seconds=flat.seconds,
        dtype=dtype,
        lengths=_u4(flat.lengths_N),
        mask=_u4(flat.mask_runs_R),
        span_counts=_u4(flat.span_counts_N),
        spans=_u4(flat.spans_5S),
        rewards=struct.pack(f"<{len(flat.rewards_N)}d", *flat.rewards_N),
        finish=bytes(flat.finish_N),
        correct=bytes(flat.correct_N),
        ids=flat.token_ids_T.astype(_ID_DTYPES[dtype]).data,
        logprobs=flat.logprobs_M.astype("<f4", copy=False).data,
    )
    return _encode((SCHEMA, fields))


def decode_flat(body: bytes) -> FlatGroup:
    """The arrays of a group, not yet validated."""
    fields = _decode(_groups, body, "group")
    spans = _numbers(fields.spans, "spans", "I", 4)
    if len(spans) % 5:
        raise WireError(f"group: field 'spans' holds {len(spans)} numbers, which is no multiple of 5")
    if not all(map(math.isfinite, fields.seconds.values())):
        raise WireError("group: field 'seconds' holds what is no finite number")
    return FlatGroup(
        task_id=fields.task,
        attempt=fields.attempt,
        kind=fields.kind,
        environment=fields.env,
        index=fields.index,
        producer=fields.producer,
        failures=fields.failures,
        outcome=fields.outcome,
        error=fields.error,
        stopped_N=fields.stopped,
        seconds=fields.seconds,
        lengths_N=_numbers(fields.lengths, "lengths", "I", 4),
        token_ids_T=_array(fields.ids, "ids", _ID_DTYPES[fields.dtype]),
        logprobs_M=_array(fields.logprobs, "logprobs", _F4).astype(np.float32, copy=False),
        mask_runs_R=_numbers(fields.mask, "mask", "I", 4),
        span_counts_N=_numbers(fields.span_counts, "span_counts", "I", 4),
        spans_5S=spans,
        rewards_N=_numbers(fields.rewards, "rewards", "d", 8),
        finish_N=fields.finish,
        correct_N=fields.correct,
    )


def decode_group(body: bytes, limits: Limits) -> Group:
    """Decode and validate. Raises WireError with the reason."""
    (found,) = decode_groups([body], limits)
    if isinstance(found, WireError):
        raise found
    return found


def decode_groups(bodies: Iterable[bytes], limits: Limits) -> list[Group | WireError]:
    """Decode and validate each. Stage by stage for all: code that has just run is quicker than code that has not."""
    flats = [_flat_or_error(body) for body in bodies]
    checked = [flat if isinstance(flat, WireError) else _sound_or_error(flat, limits) for flat in flats]
    return [flat if isinstance(flat, WireError) else unflatten(flat) for flat in checked]


def _flat_or_error(body: bytes) -> FlatGroup | WireError:
    try:
        return decode_flat(body)
    except WireError as error:
        return error


def _sound_or_error(flat: FlatGroup, limits: Limits) -> FlatGroup | WireError:
    reason = check_flat(flat, limits)
    return WireError(reason) if reason else flat


def encode_step(record: StepRecord) -> bytes:
    entries = [(entry.entry_id, entry.task_id, entry.verdict, entry.reason) for entry in record.entries]
    return _encode((SCHEMA, _Step(record.version, entries, record.restored)))


def decode_step(body: bytes) -> StepRecord:
    fields = _decode(_steps, body, "step")
    entries = tuple(StepEntry(*entry) for entry in fields.entries)
    restored = None if fields.restored is None else PolicyVersion(*fields.restored)
    return StepRecord(PolicyVersion(*fields.version), entries, restored)


def _decode(decoder: msgspec.msgpack.Decoder[tuple[Any, T]], body: bytes, what: str) -> T:
    try:
        return decoder.decode(body)[1]
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"{what}: {_refusal(body, error)}") from None


def _refusal(body: bytes, error: Exception) -> str:
    """What is wrong with a body."""
    try:
        parts = msgspec.msgpack.decode(body, type=list[msgspec.Raw])
        schema = msgspec.msgpack.decode(parts[0]) if len(parts) == 2 else None
    except msgspec.ValidationError:
        schema = None
    except (msgspec.MsgspecError, RecursionError):
        return "the body is not msgpack"
    if schema is None:
        return "the body is not [schema, fields]"
    if schema != SCHEMA:
        return f"schema {str(schema)[:20]}, but this process speaks {SCHEMA}"
    # As in "Expected `str`, got `int` - at `$[1].task`".
    return str(error).replace("`", "")[:200]


def _id_dtype(ids_T: npt.NDArray[Any], vocab_size: int) -> Literal["<u1", "<u2", "<u4", "<i4"]:
    """The narrowest that holds the vocabulary, and any id that is wrongly outside: the receiver sees it as it is."""
    # Seen as unsigned, a negative one is the largest.
    high = int(ids_T.view(np.uint32).max()) if len(ids_T) else 0
    if high > MAX_ID:
        return "<i4"
    high = max(high, vocab_size - 1)
    return "<u1" if high < 1 << 8 else "<u2" if high < 1 << 16 else "<u4"


def _u4(numbers: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(numbers)}I", *numbers)
    except struct.error:
        # A number outside its range is wrapped; it is then out of every bound, which the receiver sees.
        return np.array(numbers, np.int64).astype("<u4").tobytes()


_F4 = np.dtype("<f4")


def _numbers(raw: bytes, name: str, code: str, size: int) -> tuple[Any, ...]:
    """Numbers of which a group has few, by their code in `struct`."""
    count, rest = divmod(len(raw), size)
    if rest:
        raise _no_multiple(raw, name, size)
    if count > MAX_FEW:
        raise WireError(f"group: field {name!r} holds {count} numbers, more than {MAX_FEW}")
    return struct.unpack(f"<{count}{code}", raw)


def _array(raw: memoryview, name: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if len(raw) % dtype.itemsize:
        raise _no_multiple(raw, name, dtype.itemsize)
    return np.frombuffer(raw, dtype)


def _no_multiple(raw: bytes | memoryview, name: str, size: int) -> WireError:
    return WireError(f"group: field {name!r} has {len(raw)} bytes, which is no multiple of {size}")
