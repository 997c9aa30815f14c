"""The group: one rank's view of all, and what they do together. A group of one exchanges nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from consumers.ranks.alarm import Alarm
from consumers.ranks.channel import Channel
from consumers.ranks.children import Children
from consumers.ranks.orders import Order, decode, encode
from headrace.errors import HeadraceError, ServiceError, WeightError

EXPLAINED_S = 3.0
"""Until a collective that failed is known to have failed by another rank."""


class Ranks:
    """Methods that exchange something are called by all ranks, in the same order, on the worker's thread."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        local: int = 0,
        children: Children | None = None,
        *,
        sharded: bool = False,
    ) -> None:
        self.rank = rank
        self.size = size
        self.sharded = sharded
        """Each has a part of the model only."""
        self._children = children
        self.local = local
        """Number of this process on its host: the GPU that is its own."""
        self._orders: Channel | None = None
        self._parts: Channel | None = None
        self._alarm: Alarm | None = None
        self.saving: Channel | None = None
        """For checkpoints, on threads of their own."""

    def connect(self, orders: Channel, parts: Channel, saving: Channel, alarm: Alarm) -> None:
        self._orders, self._parts, self.saving, self._alarm = orders, parts, saving, alarm
        alarm.start()

    # -- orders

    def tell(self, order: Order) -> None:
        """Rank 0: all others do this next."""
        self.deal([order] * (self.size - 1))

    def deal(self, shares: Sequence[Order]) -> None:
        """Rank 0: each of the others does its share, rank 1 the first."""
        if self._orders:
            self._orders.scatter([b"", *map(encode, shares)])

    def hear(self) -> Order:
        """The others: what comes next, however long it takes."""
        assert self._orders
        return decode(self._orders.scatter())

    # -- together

    def gather(self, mine: bytes) -> list[bytes]:
        return self._orders.gather(mine) if self._orders else [mine]

    def sum(self, value: float) -> float:
        return self._orders.sum(value) if self._orders else value

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor, on the CPU, becomes everybody's."""
        if self._orders:
            self._orders.spread(tensor)
        return tensor

    def reduce_gradients(self, model: torch.nn.Module) -> None:
        """Each parameter's gradient, which each rank has, becomes the sum over all. FSDP2 has done so already."""
        if self.size > 1 and not self.sharded:
            pending: list[Any] = [
                dist.all_reduce(parameter.grad, async_op=True)
                for parameter in model.parameters()
                if parameter.grad is not None
            ]
            for work in pending:
                work.wait()

    # -- failures

    @property
    def failure(self) -> str:
        """Why another rank, or this one, cannot go on; empty while all can."""
        return self._alarm.failure if self._alarm else ""

    def fail(self, reason: str) -> None:
        """Let the others know why this rank cannot go on. Any thread."""
        if self._alarm:
            self._alarm.fail(reason)

    def end(self) -> None:
        """Wait until all have done their work. Any thread."""
        if self._alarm:
            self._alarm.end()
        if self._children:
            self._children.close()

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """What fails in a collective because another rank has failed ends with that one's reason.

        Raises ServiceError with it.
        """
        try:
            yield
        except RuntimeError:
            if self._alarm and (reason := self._alarm.explained(EXPLAINED_S)):
                raise ServiceError(reason) from None
            raise


def reason_of(error: BaseException) -> str:
    """What the other ranks are told of it."""
    if isinstance(error, BaseExceptionGroup):
        return reason_of(error.exceptions[0])
    text = str(error) if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0] if text else type(error).__name__


class PublishingRanks:
    """As the publisher of weights knows them."""

    def __init__(self, ranks: Ranks) -> None:
        self.rank = ranks.rank
        self._ranks = ranks

    async def gather(self, mine: bytes) -> list[bytes]:
        """Raises ServiceError with the reason of a rank that has failed, WeightError where none is known."""
        channel = self._ranks._parts
        return [mine] if channel is None else await asyncio.to_thread(self._gather, channel, mine)

    def _gather(self, channel: Channel, mine: bytes) -> list[bytes]:
        try:
            with self._ranks.explaining():
                return channel.gather(mine)
        except RuntimeError as error:
            raise WeightError(f"a weight version is not published: {error}") from error
