"""Means "tensor": the bytes go within the request itself, to any host that the request reaches.

Each tensor travels as a plain pickle of a CPU tensor, in base64 within JSON. That is a third more bytes, and copies
of a bucket at each end; shared memory would be less, but what torch shares outlives both processes. Each rank of the
server is sent all tensors and takes its shards.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import pickle
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

from headrace.errors import WeightError
from producers.engines.remote.staged import Staged
from producers.engines.remote.updating import Way
from producers.engines.sglang.client import ServerRefused, SglangClient
from producers.engines.sglang.loading import Capabilities
from weightsync.manifest import TensorSpec

BUCKET_BYTES = 64 << 20
"""Of tensors in one request; a larger tensor has one of its own."""


class TensorMeans:
    """For one server."""

    name = "tensor"

    def __init__(self, found: Capabilities, bucket_bytes: int) -> None:
        self._found = found
        self._bucket_bytes = bucket_bytes

    async def prepare(self, client: SglangClient, staged: Staged) -> None:
        """Raises WeightError without torch."""
        await asyncio.to_thread(pickled, staged, staged.layout.tensors[:1])

    async def load(self, client: SglangClient, staged: Staged, label: str, way: Way) -> None:
        async with session(client, self._found):
            way.touched = True
            for bucket, last in with_last(buckets(staged.layout.tensors, self._bucket_bytes)):
                payload = await asyncio.to_thread(pickled, staged, bucket)
                await client.update_weights_from_tensor(
                    serialized_named_tensors=[payload] * self._found.tp_size,
                    weight_version=label if last else None,
                    flush_cache=False,
                )

    async def close(self) -> None:
        pass


def buckets(specs: Iterable[TensorSpec], nbytes: int, *, one_dtype: bool = False) -> Iterator[list[TensorSpec]]:
    """In order, each of at most so many bytes or one tensor; `one_dtype`: and of one dtype."""
    bucket: list[TensorSpec] = []
    size = 0
    for spec in specs:
        full = size + spec.nbytes > nbytes or (one_dtype and bool(bucket) and spec.dtype != bucket[-1].dtype)
        if bucket and full:
            yield bucket
            bucket, size = [], 0
        bucket.append(spec)
        size += spec.nbytes
    if bucket:
        yield bucket


def with_last(found: Iterable[list[TensorSpec]]) -> Iterator[tuple[list[TensorSpec], bool]]:
    """Each with whether it is the last."""
    waiting: list[TensorSpec] | None = None
    for bucket in found:
        if waiting is not None:
            yield waiting, False
        waiting = bucket
    if waiting is not None:
        yield waiting, True


def pickled(staged: Staged, specs: Sequence[TensorSpec]) -> str:
    """[(name, tensor), ...] as the server unpickles it. Raises WeightError without torch."""
    try:
        import torch
    except ImportError as error:
        raise WeightError(
            'means = "tensor" needs torch in the producer, which does not load here: install it, or run the server on '
            'this host for means = "folder"'
        ) from error
    named = [
        (spec.name, torch.from_numpy(staged.tensor(spec)).view(getattr(torch, spec.dtype)).view(spec.shape))
        for spec in specs
        if spec.nbytes
    ]
    return base64.b64encode(pickle.dumps(named, protocol=pickle.HIGHEST_PROTOCOL)).decode("ascii")


@contextlib.asynccontextmanager
async def session(client: SglangClient, found: Capabilities) -> AsyncIterator[None]:
    """Between a begin and an end, where the server wants them. One that fails is left open: the next one closes it."""
    if not found.sessions:
        yield
        return
    try:
        await client.begin_weight_update()
    except ServerRefused:
        await client.end_weight_update()
        await client.begin_weight_update()
    yield
    await client.end_weight_update()
