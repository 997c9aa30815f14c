"""What a decoder-only transformer computes and moves, by arithmetic. Pure.

Counted as in Kaplan et al. 2020 (arXiv:2001.08361, section 2.1): a product with a weight of n entries is 2 n operations
per token; attention is 4 operations per position of the context, head and element of a head. Norms, activations,
softmax and rotations are left out: a few per cent. Bytes are those that must move at least: weights once per pass, keys
and values as often as they are read; activations stay in caches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

ADAM_FLOP = 12
"""Of AdamW per parameter: two moving averages (3 each), a root, a quotient, the decay and the step."""
ADAM_VALUES = 7
"""Float32 values per parameter that it moves: reads weight, gradient and two moments, writes all but the gradient."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """What a device was measured to reach."""

    flop_per_s: float
    """Of a matrix product in `dtype`."""
    bytes_per_s: float
    """Read and written, of a copy within its memory."""
    dtype: str


@dataclass(frozen=True, slots=True)
class Shape:
    """What the arithmetic needs to know of a model."""

    linear: int
    """Entries of the weights that every token is multiplied with: all but embedding and head."""
    head: int
    """Entries of the output head, tied to the embedding or not: hidden size times vocabulary."""
    parameters: int
    """Everything, tied weights once."""
    layers: int
    query_width: int
    """Query heads times size of a head."""
    kv_width: int
    """Key heads times size of a head."""

    @classmethod
    def of(cls, config: Any, parameters: int, embedding: int) -> Shape:
        """Of a Hugging Face text configuration; `parameters` and `embedding` are numbers of entries."""
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        head = config.hidden_size * config.vocab_size
        outside = embedding if getattr(config, "tie_word_embeddings", False) else embedding + head
        return cls(
            linear=parameters - outside,
            head=head,
            parameters=parameters,
            layers=config.num_hidden_layers,
            query_width=heads * size,
            kv_width=(getattr(config, "num_key_value_heads", None) or heads) * size,
        )

    def forward_flop(self, tokens: int, contexts: int, rows: int) -> float:
        """Of one pass over `tokens`. `contexts`: positions that they attend to, summed over tokens, themselves
        included; `rows`: tokens whose logits are computed.
        """
        return 2.0 * self.linear * tokens + 4.0 * self.layers * self.query_width * contexts + 2.0 * self.head * rows

    def kv_bytes(self, positions: int, itemsize: int) -> float:
        """Keys and values of so many positions, in all layers."""
        return 2.0 * self.layers * self.kv_width * positions * itemsize

    def weight_bytes(self, itemsize: int) -> float:
        """Of one pass over the weights; of the embedding only the rows that are looked up are read, which are left
        out. Without a row of logits the head is not read either, which is as rare.
        """
        return float(itemsize) * (self.linear + self.head)

    def train_flop(self, tokens: int, contexts: int, rows: int) -> float:
        """Of forward and backward: the backward pass has twice the products of the forward one."""
        return 3.0 * self.forward_flop(tokens, contexts, rows)

    def train_bytes(self, itemsize: int) -> float:
        """Of one microbatch, at least: weights are read forward and backward, float32 gradients are added to."""
        return 2.0 * self.weight_bytes(itemsize) + 8.0 * self.parameters

    def adam_flop(self) -> float:
        return float(ADAM_FLOP * self.parameters)

    def adam_bytes(self) -> float:
        """Of one step, and of the reading of gradients that clipping needs."""
        return 4.0 * (ADAM_VALUES + 1) * self.parameters


def chunk_contexts(start: int, count: int) -> int:
    """Positions that `count` tokens after `start` attend to, summed, each itself included."""
    return count * start + count * (count + 1) // 2


def block_contexts(prefix: int, suffixes: Iterable[int]) -> int:
    """Of a prefix and of suffixes that each attend to it and to themselves."""
    return chunk_contexts(0, prefix) + sum(chunk_contexts(prefix, count) for count in suffixes)
