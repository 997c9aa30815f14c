"""Means "collective": a torch.distributed group of this producer and a server, by gloo or nccl, for servers elsewhere.

Our rank is a child process (`broadcasting.py`), because a broadcast that the other end does not take part in cannot be
called off: a server that refuses the request leaves the child waiting, and the child is killed.

Wait graph. `prepare` waits for the child to import torch (START_S) and, with the server's answer, for the group
(JOIN_S). `load` waits for whichever ends first, the server's answer or the child's; where one fails the other is ended.
The update's deadline stands above all of it. A group that failed is given up: the next update makes another, under
another name, as the server keeps the name of one that is dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Coroutine, Sequence
from typing import Any
from urllib.parse import urlsplit

from headrace.errors import HeadraceError, WeightError
from producers.engines.remote.staged import Staged
from producers.engines.remote.updating import Way
from producers.engines.sglang.client import SglangClient
from producers.engines.sglang.loading import Capabilities
from producers.engines.sglang.tensor import buckets, session, with_last
from weightsync.bulk.pairs import SLOWEST, START_S, Child, PairBroken
from weightsync.manifest import TensorSpec

BUCKET_BYTES = 256 << 20
"""Of one broadcast, which the server takes memory for; a larger tensor has one of its own."""
JOIN_S = 30.0
STALL_S = 30.0
"""Within which a broadcast must begin to move."""
_PROGRAM = "producers.engines.sglang.broadcasting"


class CollectiveMeans:
    """For one server."""

    name = "collective"

    def __init__(self, found: Capabilities, bucket_bytes: int) -> None:
        self._found = found
        self._bucket_bytes = bucket_bytes
        self._group: Group | None = None

    @property
    def pid(self) -> int | None:
        """Of the child; None without a group."""
        return None if self._group is None else self._group.child.pid

    async def prepare(self, client: SglangClient, staged: Staged) -> None:
        """Raises WeightError where there can be no group, or what the client raises."""
        if self._group is not None and not self._group.child.alive:
            await self._give_up()
        if self._group is None:
            self._group = await joined(client, self._found)

    async def load(self, client: SglangClient, staged: Staged, label: str, way: Way) -> None:
        group = self._group
        assert group is not None
        with staged.file.open("rb") as file:
            try:
                async with session(client, self._found):
                    way.touched = True
                    specs = buckets(staged.layout.tensors, self._bucket_bytes, one_dtype=True)
                    for bucket, last in with_last(specs):
                        asked = self._asked(client, bucket, group.name, label if last else None)
                        await group.both(
                            asked, group.broadcast, file.fileno(), staged.place(bucket[0]), _nbytes(bucket)
                        )
            except BaseException:
                group.child.kill()
                raise

    async def close(self) -> None:
        await self._give_up()

    async def _give_up(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            await group.close()

    def _asked(
        self, client: SglangClient, bucket: Sequence[TensorSpec], group: str, label: str | None
    ) -> Coroutine[Any, Any, Any]:
        return client.update_weights_from_distributed(
            names=[spec.name for spec in bucket],
            dtypes=[spec.dtype for spec in bucket],
            shapes=[list(spec.shape) for spec in bucket],
            group_name=group,
            load_format="flattened_bucket",
            weight_version=label,
            flush_cache=False,
        )


class Group:
    """One that both ends are in."""

    def __init__(self, client: SglangClient, child: Child, name: str) -> None:
        self.child = child
        self.name = name
        self._client = client

    async def both(self, asked: Coroutine[Any, Any, Any], ours: Any, *arguments: Any) -> Any:
        """The server's answer and our child's, which come only together. Raises what the first of them raises."""
        moving = asyncio.ensure_future(asyncio.to_thread(ours, *arguments))
        asking = asyncio.ensure_future(asked)
        try:
            done, _ = await asyncio.wait({asking, moving}, return_when=asyncio.FIRST_EXCEPTION)
            # The server's reason is the better one.
            for one in (asking, moving):
                if one in done:
                    one.result()
            return moving.result()
        except PairBroken as error:
            raise WeightError(f"the group with the server broke: {error}") from error
        finally:
            if not (asking.done() and moving.done()):
                self.child.kill()
            asking.cancel()
            await asyncio.wait({asking, moving})
            for one in (asking, moving):
                # Whatever the second one says is of no more use.
                if not one.cancelled():
                    one.exception()

    def broadcast(self, file: int, start: int, nbytes: int) -> None:
        """These bytes of a file, to all. Any thread, one at a time. Raises PairBroken."""
        self.child.tell("broadcast", file, start=start, nbytes=nbytes)
        self.child.answer(STALL_S + nbytes / SLOWEST)

    def lead(self, address: str, backend: str, world: int) -> int:
        """Begin to wait for the others; the port at which. Raises PairBroken."""
        self.child.tell("lead", address=address, group=self.name, backend=backend, world=world, join_s=JOIN_S)
        port: int = self.child.answer(JOIN_S)["port"]
        return port

    async def close(self) -> None:
        await asyncio.to_thread(self.child.close)
        with contextlib.suppress(HeadraceError, TimeoutError):
            async with asyncio.timeout(JOIN_S):
                await self._client.destroy_weights_update_group(group_name=self.name)


async def joined(client: SglangClient, found: Capabilities) -> Group:
    """A new group with the server. Raises WeightError, or what the client raises."""
    child = await asyncio.to_thread(_child)
    group = Group(client, child, f"headrace-{secrets.token_hex(8)}")
    try:
        backends = await asyncio.to_thread(child.backends, START_S)
        backend = "nccl" if found.device == "cuda" and "nccl" in backends else "gloo"
        address = address_towards(client.url)
        port = await asyncio.to_thread(group.lead, address, backend, 1 + found.tp_size)
        asked = client.init_weights_update_group(
            master_address=address,
            master_port=port,
            rank_offset=1,
            world_size=1 + found.tp_size,
            group_name=group.name,
            backend=backend,
        )
        await group.both(asked, child.answer, 2 * JOIN_S)
    except PairBroken as error:
        await group.close()
        raise WeightError(f"there is no group with the server: {error}") from error
    except BaseException:
        await group.close()
        raise
    return group


def address_towards(url: str) -> str:
    """This host's address as a server at that URL sees it. Raises WeightError where there is no way to it."""
    split = urlsplit(url)
    port = split.port or (443 if split.scheme == "https" else 80)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(split.hostname, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise WeightError(f"there is no way to {split.hostname}: {error.strerror or error}") from error


def _child() -> Child:
    try:
        return Child(_PROGRAM)
    except PairBroken as error:
        raise WeightError(str(error)) from error


def _nbytes(bucket: Sequence[TensorSpec]) -> int:
    return sum(spec.nbytes for spec in bucket)
