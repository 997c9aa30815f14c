"""A channel: bytes and numbers between all ranks, over a gloo group of its own. Nothing is pickled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class Channel:
    """For one thread at a time. Each call is made by all ranks, in the same order.

    Raises RuntimeError where a rank is gone, or silent for longer than the group waits.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.group = self._group = group
        """Of torch.distributed."""
        self._rank = rank
        self._size = size

    def gather(self, mine: bytes) -> list[bytes]:
        """What each rank says, in the order of ranks."""
        lengths = self._lengths(len(mine))
        sent = _tensor(mine, max(lengths))
        came = [torch.empty_like(sent) for _ in lengths]
        if max(lengths):
            dist.all_gather(came, sent, group=self._group)
        return [_bytes(one, length) for one, length in zip(came, lengths, strict=True)]

    def scatter(self, shares: Sequence[bytes] | None = None) -> bytes:
        """What rank 0, which gives the shares of all, has for this rank; it waits for the others no longer than its
        bytes take."""
        lengths = torch.tensor([len(share) for share in shares or ()] or [0] * self._size)
        dist.broadcast(lengths, src=0, group=self._group)
        most = int(lengths.max())
        if not most:
            return b""
        came = torch.empty(most, dtype=torch.uint8)
        dist.scatter(came, [_tensor(share, most) for share in shares] if shares else None, src=0, group=self._group)
        return _bytes(came, int(lengths[self._rank]))

    def sum(self, value: float) -> float:
        """Over all ranks, in float64."""
        total = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return float(total)

    def spread(self, tensor: torch.Tensor) -> None:
        """Rank 0's, on the CPU, becomes everybody's."""
        dist.broadcast(tensor, src=0, group=self._group)

    def _lengths(self, mine: int) -> list[int]:
        came = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
        dist.all_gather(came, torch.tensor([mine]), group=self._group)
        return [int(length) for length in came]


def _tensor(data: bytes, size: int) -> torch.Tensor:
    """uint8 [size], longer than the data where others have more."""
    whole = bytearray(size)
    whole[: len(data)] = data
    return torch.frombuffer(whole, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


def _bytes(tensor: torch.Tensor, length: int) -> bytes:
    return tensor[:length].numpy().tobytes()
