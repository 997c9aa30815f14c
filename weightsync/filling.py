"""Filling a segment: tensors are copied into their places by one thread, whole chunks are digested by another."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from headrace.errors import WeightError
from weightsync.arena import NewSegment
from weightsync.digests import digest_of
from weightsync.manifest import Layout, TensorSpec, rows_of, size_of
from weightsync.placement import Bytes, chunk_bounds, places

if TYPE_CHECKING:
    import torch


class Filling:
    """One part of one version on its way into its segment."""

    def __init__(self, segment: NewSegment, layout: Layout, part: int) -> None:
        self._segment = segment
        self._layout = layout
        self._part = part
        self._copied = 0
        """Bytes that are copied, from the segment's begin on."""
        self._given_up = False
        self._moved = threading.Condition()

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> float:
        """Cast each tensor's rows of this part to its wire dtype, straight into their place. Answers the seconds.

        Raises WeightError once it was given up.
        """
        start = time.perf_counter()
        data = np.frombuffer(self._segment.data, np.uint8)
        for place, spec in places(self._layout, self._part):
            if self._given_up:
                raise WeightError(f"weight segment {self._segment.name} is dropped: its publisher closes")
            self._advance(place)
            shape = shape_of(spec, self._part, self._layout.parts)
            nbytes = size_of(spec.dtype, shape)
            _cast(tensors[spec.name], spec.dtype, shape, data[place : place + nbytes])
        self._advance(self._segment.nbytes)
        return time.perf_counter() - start

    def digest(self) -> tuple[bytes, ...] | None:
        """Digest each chunk once it is copied, and let readers have it. None when it was given up."""
        digests = []
        data = self._segment.data
        try:
            for start, end in chunk_bounds(self._layout, self._part):
                with self._moved:
                    while self._copied < end and not self._given_up:
                        self._moved.wait()
                if self._given_up:
                    return None
                digests.append(digest_of([data[start:end]]))
                self._segment.grow(digests[-1:])
        finally:
            data.release()
        return tuple(digests)

    def give_up(self) -> None:
        """Both threads return soon."""
        with self._moved:
            self._given_up = True
            self._moved.notify_all()

    def _advance(self, copied: int) -> None:
        with self._moved:
            self._copied = copied
            self._moved.notify_all()


def shape_of(spec: TensorSpec, part: int, parts: int) -> tuple[int, ...]:
    """What one rank holds of a tensor."""
    if parts == 1 or not spec.shape:
        return spec.shape
    _, first, end = rows_of(spec, part, parts)
    return (end - first, *spec.shape[1:])


def _cast(tensor: torch.Tensor, dtype: str, shape: tuple[int, ...], data: Bytes) -> None:
    import torch

    wire = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[dtype]
    with torch.no_grad():
        torch.from_numpy(data).view(wire).view(shape).copy_(tensor.detach())
