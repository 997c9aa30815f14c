"""What one step of the decode loop computes, by phase: how its time is apportioned, and how intense it was. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.telemetry.arithmetic import Shape, chunk_contexts
from producers.engines.slot_attention import Chunk


@dataclass(frozen=True, slots=True)
class Effort:
    """Of one phase in one step."""

    phase: str
    flop: float
    nbytes: float


def efforts(
    shape: Shape, itemsize: int, contexts: Sequence[int], chunks: Sequence[Chunk], recomputed: int
) -> list[Effort]:
    """Prompts, recomputation, decoding, as far as each is in the step.

    `contexts`: of each decoding slot with its new token; `recomputed`: tokens of the chunks that were in the cache
    before. Chunks are split by tokens, since one may hold both; the bytes of the weights, which a step reads once, by
    operations.
    """
    found: list[Effort] = []
    tokens = sum(chunk.count for chunk in chunks)
    if tokens:
        attended = sum(chunk_contexts(chunk.start, chunk.count) for chunk in chunks)
        # Whether a chunk ends its prompt is not asked: a row of logits more or less.
        flop = shape.forward_flop(tokens, attended, len(chunks))
        nbytes = shape.kv_bytes(sum(chunk.start + 2 * chunk.count for chunk in chunks), itemsize)
        again = recomputed / tokens
        found += [
            Effort(phase, flop * share, nbytes * share)
            for phase, share in (("prefill", 1 - again), ("recompute", again))
            if share
        ]
    if contexts:
        count, attended = len(contexts), sum(contexts)
        found.append(
            Effort("decode", shape.forward_flop(count, attended, count), shape.kv_bytes(attended + count, itemsize))
        )
    total = sum(effort.flop for effort in found)
    weights = shape.weight_bytes(itemsize)
    return [Effort(one.phase, one.flop, one.nbytes + weights * one.flop / total) for one in found]
