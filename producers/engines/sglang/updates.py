"""One server's weights: from one version to the next while its requests wait, and compared with what was staged.

    learn, prepare (the server goes on decoding) -> pause -> load -> compare -> flush -> continue

How far one was when it failed stands in `producers/engines/remote/updating.py`.

Every wait is bounded by one deadline for the whole update, which grows with the version's size. A server that dies ends
the request that is open; one that hangs ends with the deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.errors import WeightError
from producers.engines.remote.checksums import Checker, ChecksumChecker, Rank, RowChecker, Verify, checksums_of
from producers.engines.remote.spans import Kv
from producers.engines.remote.staged import Staged
from producers.engines.remote.updating import DEADLINE_S, UpdateFailed, Way, deadline_s, failing, standing_still
from producers.engines.sglang.client import ServerRefused, SglangClient
from producers.engines.sglang.loading import (
    PAUSES,
    SLOWEST_BY,
    Capabilities,
    Means,
    MeansName,
    candidates,
    refuse_mode,
)
from weightsync.manifest import Layout

log = logging.getLogger(__name__)

IDLE_S = 10.0
"""For a server to have nothing left of the requests that it aborted."""
_NOTHING_LOADED = ("Failed to get weights iterator", "Failed to get model loader", "Online weight updates are not")
"""How a server begins to say that it has loaded nothing."""


class Updater:
    """The updates of one server; one at a time."""

    def __init__(
        self,
        client: SglangClient,
        found: Capabilities,
        kv: Kv,
        means: MeansName = "auto",
        verify: Verify = "all",
        *,
        base_s: float = DEADLINE_S,
        bucket_bytes: int | None = None,
    ) -> None:
        """`base_s` is of the deadline; `bucket_bytes` bounds what "tensor" and "collective" send at once.

        Raises ConfigError for what the server cannot do.
        """
        refuse_mode(kv, found)
        self._client = client
        self._found = found
        self._kv: Kv = kv
        self._verify: Verify = verify
        self._base_s = base_s
        self._bucket_bytes = bucket_bytes
        self._left = candidates(means, found)
        self._means: Means | None = None
        self._checker: tuple[Layout, Checker] | None = None
        self._dirty = False
        """The server may have a half of a version: it stays paused until it has a whole one."""
        self._lock = asyncio.Lock()

    @property
    def means(self) -> str:
        """The name of the means that the next update takes."""
        return self._left[0]

    async def update(self, staged: Staged, label: str) -> float:
        """Bring a sealed version into the server, under this label. Returns the seconds for which it stood still.

        Raises UpdateFailed. One that is cancelled counts as half-way.
        """
        return await self._bring(staged, label, whole=False)

    async def reload(self, staged: Staged, label: str) -> float:
        """The same for a server that restarted, or whose update failed half-way: all tensors are compared."""
        return await self._bring(staged, label, whole=True)

    async def close(self) -> None:
        """Idempotent."""
        if self._means is not None:
            await self._means.close()
            self._means = None

    async def _bring(self, staged: Staged, label: str, *, whole: bool) -> float:
        async with self._lock:
            while True:
                way = Way(self._dirty)
                try:
                    return await self._once(staged, label, way, whole=whole or self._dirty)
                except UpdateFailed as error:
                    if way.touched or not way.by_other_means or len(self._left) == 1:
                        raise
                    await self._next(error)
                finally:
                    self._dirty = way.half_way

    async def _next(self, error: UpdateFailed) -> None:
        """The server was not touched: try the next means, for good."""
        await self.close()
        failed = self._left.pop(0)
        log.warning('weights come to %s by "%s", not "%s": %s', self._client.url, self._left[0], failed, error)

    async def _once(self, staged: Staged, label: str, way: Way, *, whole: bool) -> float:
        client, seconds = self._client, deadline_s(staged.layout, self._base_s, SLOWEST_BY[self.means])
        async with failing(way, f"version {label} did not come into {client.url}", seconds):
            checker = await self._learn(staged.layout)
            means = self._means = self._means or _means(self._left[0], self._found, self._bucket_bytes)
            with _of_the_means(way):
                await means.prepare(client, staged)
            await asyncio.to_thread(checker.prepare, staged)
            start = time.perf_counter()
            async with standing_still(
                way, lambda: client.pause_generation(PAUSES[self._kv]), client.continue_generation
            ):
                with _of_the_means(way):
                    await means.load(client, staged, label, way)
                if fault := await checker.fault(staged, whole=whole):
                    raise WeightError(f"the server says that it has loaded the version, but {fault}")
                await self._flush()
            way.arrived()
            return time.perf_counter() - start

    async def _flush(self) -> None:
        """Keys and values that the old weights made. What keeps them keeps its prefixes apart by version."""
        if self._kv != "keep":
            # Retracted requests count as none while it is paused; aborted ones end one step later.
            await self._client.flush_cache(timeout_s=IDLE_S if self._kv == "resume" else 0.0)

    async def _learn(self, layout: Layout) -> Checker:
        """What the server's tensors are called; asked once per layout, before anything stands still."""
        if self._checker is None or self._checker[0] != layout:
            checker = await checker_for(self._client, self._found, layout, self._verify)
            if checker.unknown and self._verify == "all":
                raise WeightError(_unknown(checker.unknown))
            self._checker = layout, checker
            log.info('weights come to %s by "%s"; compared: %s', self._client.url, self.means, checker.what)
        return self._checker[1]


def _unknown(names: Sequence[str]) -> str:
    return (
        f"it has no tensor for {len(names)} of the version's ({names[0]}, …), and would say that it had loaded them; "
        'serve the same model, or set verify = "sample" where it is known to keep them under other names'
    )


async def checker_for(client: SglangClient, found: Capabilities, layout: Layout, verify: Verify) -> Checker:
    """By checksums where the server computes them, else by rows. Raises what the client raises."""
    sample = verify == "sample"

    async def ranks(skipped: Sequence[str]) -> list[Rank]:
        return checksums_of(await client.weights_checker(action="checksum", skip_tensor_list=skipped))

    async def first_row(name: str) -> Any:
        return await client.get_weights_by_name(name, truncate_size=1)

    if "/weights_checker" not in found.routes:
        return RowChecker(layout, first_row, "it has no /weights_checker", sample=sample)
    try:
        named = await ranks([])
    except ServerRefused as error:
        return RowChecker(layout, first_row, str(error), sample=sample)
    return ChecksumChecker(layout, ranks, named, device=found.device, dtype=found.dtype, sample=sample)


class FolderMeans:
    """The server loads the folder that the version was staged into."""

    name = "folder"

    def __init__(self, load_format: str) -> None:
        self._load_format = load_format

    async def prepare(self, client: SglangClient, staged: Staged) -> None:
        pass

    async def load(self, client: SglangClient, staged: Staged, label: str, way: Way) -> None:
        way.touched = True
        try:
            await client.update_weights_from_disk(
                model_path=str(staged.folder),
                weight_version=label,
                # One that loads no files, as "dummy", keeps nobody from loading some later.
                load_format=None if self._load_format in ("auto", "safetensors", "flash_rl") else "safetensors",
                flush_cache=False,
            )
        except ServerRefused as error:
            if str(error).startswith(_NOTHING_LOADED):
                way.touched = False
            raise

    async def close(self) -> None:
        pass


def _means(name: str, found: Capabilities, bucket_bytes: int | None) -> Means:
    if name == "folder":
        return FolderMeans(found.load_format)
    if name == "tensor":
        from producers.engines.sglang import tensor

        return tensor.TensorMeans(found, bucket_bytes or tensor.BUCKET_BYTES)
    from producers.engines.sglang import collective

    return collective.CollectiveMeans(found, bucket_bytes or collective.BUCKET_BYTES)


@contextlib.contextmanager
def _of_the_means(way: Way) -> Iterator[None]:
    """What fails in here may go by other means, unless the server itself is at its end."""
    try:
        yield
    except (ServerRefused, WeightError):
        way.by_other_means = True
        raise
