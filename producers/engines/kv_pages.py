"""The key-value cache: one pool of pages, and which slot holds which.

Pages are handed out lowest first, so that the ones in use lie close together at the pool's start and attention can
read them as one block. The pool holds every slot at full context, so a page is always there when a slot grows.
"""

from __future__ import annotations

import heapq
import math
import mmap

import numpy as np
import numpy.typing as npt
import torch

PAGE = 32
"""Tokens of a page: the fastest for batched products on a CPU among 16, 32 and 64."""
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
AT_ONCE = 1 << 20
"""Bytes of a copy that are on their way together."""

Ints = npt.NDArray[np.int64]


class PageTable:
    """Which pages each slot holds, in order. Host memory only; S slots, M pages of a slot at most."""

    def __init__(self, slots: int, context_length: int) -> None:
        self.pages_per_slot = -(-context_length // PAGE)
        self.pages = slots * self.pages_per_slot
        self.table_SM: Ints = np.zeros((slots, self.pages_per_slot), np.int64)
        self.counts_S: Ints = np.zeros(slots, np.int64)
        self._free = list(range(self.pages))

    def grow(self, slot: int, length: int) -> None:
        """Give `slot` the pages for `length` tokens in all."""
        while self.counts_S[slot] * PAGE < length:
            self.table_SM[slot, self.counts_S[slot]] = heapq.heappop(self._free)
            self.counts_S[slot] += 1

    def release(self, slot: int) -> None:
        """Take back all pages of `slot`."""
        for page in self.table_SM[slot, : self.counts_S[slot]]:
            heapq.heappush(self._free, int(page))
        self.counts_S[slot] = 0

    def move(self, slot: int, target: int) -> None:
        """Give all pages of `slot` to `target`, which has none."""
        self.table_SM[target], self.counts_S[target] = self.table_SM[slot], self.counts_S[slot]
        self.counts_S[slot] = 0

    def held(self, slot: int) -> Ints:
        """The pages of `slot`, in the order of its tokens."""
        return self.table_SM[slot, : self.counts_S[slot]]


class PagePool:
    """The memory: [layers, 2 (keys, values), pages, kv heads, PAGE, head dimension]."""

    def __init__(
        self, layers: int, pages: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.kv_heads = kv_heads
        self._shape = layers, 2, pages, kv_heads, PAGE, head_dim
        self._dtype, self._device = dtype, device
        self.nbytes = math.prod(self._shape) * dtype.itemsize
        self._page_bytes = self.nbytes // layers // pages
        """Of one layer."""
        self.reserve()

    def reserve(self) -> None:
        """Have the memory, with nothing in it."""
        # Zeros, not garbage: what masked positions hold is multiplied by zero, and must be finite.
        if self._device.type == "cpu":
            # Memory of its own, which goes back when it is freed: what glibc keeps, another process cannot have.
            own = torch.frombuffer(mmap.mmap(-1, self.nbytes, flags=PRIVATE), dtype=torch.uint8)
            self.memory = own.view(self._dtype).view(self._shape)
        else:
            self.memory = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        self._layers = [(layer[0], layer[1]) for layer in self.memory]

    def free(self) -> None:
        """Give the memory back, until `reserve`."""
        self._layers = []
        self.memory = torch.empty(0, device=self._device)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each [pages, kv heads, PAGE, head dimension]."""
        return self._layers[index]

    def rows_of(self, pages_T: Ints, offsets_T: Ints) -> Ints:
        """Row numbers [T * kv heads] of tokens in a layer seen as [pages * kv heads * PAGE, head dimension]."""
        heads = np.arange(self.kv_heads)
        return ((pages_T[:, None] * self.kv_heads + heads) * PAGE + offsets_T[:, None]).reshape(-1)

    def copy(self, source: Ints, target: Ints) -> None:
        """Copy whole pages, all layers, keys and values; some layers at a time, which the CPU's cache holds."""
        device, step = self.memory.device, max(1, AT_ONCE // (self._page_bytes * len(source)))
        from_P, to_P = torch.as_tensor(source, device=device), torch.as_tensor(target, device=device)
        for layer in range(0, len(self.memory), step):
            part = self.memory[layer : layer + step]
            part.index_copy_(2, to_P, part.index_select(2, from_P))
