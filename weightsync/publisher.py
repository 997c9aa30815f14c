"""The publisher: runs in the trainer and makes each policy version an immutable segment of this host.

Wait graph. `publish` is the only coroutine that works; the trainer awaits it. It waits for its own casting thread
(bounded by the model's size) and for the broker (bounded by the broker's own time limit), never for a reader:
readers hold leases and mappings, and when those leave no room the version is skipped and counted.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from broker.api import Fence, WeightsPort
from headrace.errors import Fenced, WeightError
from headrace.version import PolicyVersion
from weightsync.arena import Arena, NewSegment, SegmentName
from weightsync.digests import digest_of
from weightsync.manifest import Layout, Manifest, TensorSpec, encode
from weightsync.retention import Held, freeable

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """Counters since start; a reader takes differences."""

    published: int = 0
    skipped: int = 0
    """Versions that were not published because no segment was free."""
    freed: int = 0
    nbytes: int = 0
    """Bytes written into segments."""
    cast_s: float = 0.0
    """Seconds of casting and digesting, in the thread."""
    publish_s: float = 0.0
    """Seconds of `publish` calls that published, casting included: what the trainer waited."""


class Publisher:
    """Publishes the versions of one trainer incarnation, one after the other."""

    def __init__(
        self,
        port: WeightsPort,
        fence: Fence,
        layout: Layout,
        run_id: str,
        max_live_versions: int,
        *,
        host: str | None = None,
        arena: Arena | None = None,
    ) -> None:
        """`max_live_versions` bounds the segments of this run on this host, the one being filled included.

        Removes what dead trainers of other runs left on this host. Raises WeightError without a folder for segments.
        """
        if max_live_versions < 2:
            raise ValueError(f"max_live_versions = {max_live_versions} leaves no room for a version beside the head")
        self._port = port
        self._fence = fence
        self._layout = layout
        self._run_id = run_id
        self._max_live = max_live_versions
        self._host = host or socket.gethostname()
        self._arena = arena or Arena()
        self._stats = PublisherStats()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._newest: Manifest | None = None
        self._closing = threading.Event()
        self._one = asyncio.Lock()
        self._arena.sweep(spare=run_id)

    def stats(self) -> PublisherStats:
        return self._stats

    async def publish(self, version: PolicyVersion, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Cast the tensors of the layout into a new segment, seal it, and move the head to it.

        `tensors` has exactly the layout's names, with its shapes, of any dtype and on any device; they may not
        change until this returns. False when the version was skipped because no segment was free.

        Raises WeightError for tensors that do not fit or when there is no memory, Fenced, BrokerUnavailable.
        """
        if fault := self._fault(version, tensors):
            raise WeightError(f"weight version {version} cannot be published: {fault}")
        async with self._one:
            start = time.perf_counter()
            if len(await self._free()) >= self._max_live:
                self._stats = replace(self._stats, skipped=self._stats.skipped + 1)
                log.info("weight version %s is skipped: all %d segments are in use", version, self._max_live)
                return False
            segment, manifest, cast_s = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._cast, version, dict(tensors)
            )
            await self._announce(segment, manifest)
            await self._free()
            stats = self._stats
            self._stats = replace(
                stats,
                published=stats.published + 1,
                nbytes=stats.nbytes + self._layout.nbytes,
                cast_s=stats.cast_s + cast_s,
                publish_s=stats.publish_s + time.perf_counter() - start,
            )
            return True

    async def announce_again(self) -> None:
        """Say once more what the newest published version is: Redis may have lost it. Raises Fenced."""
        async with self._one:
            if self._newest is not None:
                await self._port.publish_head(self._fence, self._newest.version, encode(self._newest))

    async def close(self) -> None:
        """Unlink all segments of this incarnation. Idempotent; readers keep what they have mapped."""
        self._closing.set()
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)
        for name in self._arena.segments(self._run_id):
            if name.version.incarnation == self._fence.incarnation:
                await asyncio.to_thread(self._arena.remove, name)

    def _fault(self, version: PolicyVersion, tensors: Mapping[str, torch.Tensor]) -> str | None:
        if self._closing.is_set():
            return "its publisher is closed"
        if version.incarnation != self._fence.incarnation:
            return f"this trainer is incarnation {self._fence.incarnation}"
        if unknown := tensors.keys() - {spec.name for spec in self._layout.tensors}:
            return f"tensor {min(unknown)!r} is not in the layout"
        for spec in self._layout.tensors:
            tensor = tensors.get(spec.name)
            if tensor is None:
                return f"tensor {spec.name!r} is missing"
            if tuple(tensor.shape) != spec.shape:
                return f"tensor {spec.name!r} has shape {list(tensor.shape)}, the layout says {list(spec.shape)}"
        return None

    async def _free(self) -> list[SegmentName]:
        """Free what nobody needs; returns the segments of this run that stay."""
        names = self._arena.segments(self._run_id)
        if not names:
            return []
        head, leased = await self._port.head(), await self._port.leased()
        held = [Held(str(name), name.version, name.owner.alive) for name in names]
        going = {item.name for item in freeable(held, head, leased)}
        for name in names:
            if str(name) in going and await asyncio.to_thread(self._arena.remove, name):
                await self._port.forget(name.version)
                self._stats = replace(self._stats, freed=self._stats.freed + 1)
        return [name for name in names if str(name) not in going]

    def _cast(self, version: PolicyVersion, tensors: dict[str, torch.Tensor]) -> tuple[NewSegment, Manifest, float]:
        """In the thread: one copy per tensor, digested while it is warm in the cache."""
        start = time.perf_counter()
        segment = self._create(version)
        try:
            data = np.frombuffer(segment.data, np.uint8)
            digests = []
            for spec in self._layout.tensors:
                if self._closing.is_set():
                    raise WeightError(f"weight version {version} is dropped: its publisher closes")
                _copy(tensors[spec.name], spec, data)
                digests.append(digest_of(data[spec.offset : spec.end]))
            del data
            segment.seal()
            manifest = Manifest(
                version, self._layout, tuple(digests), self._host, segment.name, True, self._run_id, time.time()
            )
        except BaseException:
            segment.discard()
            raise
        return segment, manifest, time.perf_counter() - start

    def _create(self, version: PolicyVersion) -> NewSegment:
        try:
            return self._arena.create(self._run_id, version, self._layout.nbytes)
        except WeightError:
            if not self._arena.sweep(orphan_age_s=0.0):
                raise
            return self._arena.create(self._run_id, version, self._layout.nbytes)

    async def _announce(self, segment: NewSegment, manifest: Manifest) -> None:
        try:
            await self._port.publish_head(self._fence, manifest.version, encode(manifest))
        except Fenced:
            segment.discard()
            raise
        self._newest = manifest


def _copy(tensor: torch.Tensor, spec: TensorSpec, data: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
    """Cast one tensor to its wire dtype, straight into its place."""
    import torch

    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[spec.dtype]
    place = torch.from_numpy(data[spec.offset : spec.end]).view(dtype).view(spec.shape)
    with torch.no_grad():
        place.copy_(tensor.detach())
