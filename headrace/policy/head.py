"""A model's last product over a packed row, in pieces: memory does not grow with vocabulary times tokens.

Logits of one piece exist at a time. Where a row has several and a gradient is wanted, each piece is computed once more
in the backward pass. Suffixes: N chosen tokens, n of them, V entries of the vocabulary, C columns, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from headrace.policy.blocks import Block

Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From logits [n, V] and targets [n] to columns [n, C]."""

PIECE_BYTES = 192 << 20
"""Logits of one piece at most, on a CPU: in bfloat16 those of 2,048 tokens and a vocabulary of 49,152."""
PIECE_BYTES_DEVICE = 1 << 30


def packed_scores(
    model: Any,
    token_ids_T: torch.Tensor,
    positions_T: torch.Tensor,
    blocks: Sequence[Block],
    sources_N: torch.Tensor,
    targets_N: torch.Tensor,
    score: Score,
) -> torch.Tensor:
    """[N, C]: `score` of the logits after the tokens at `sources_N` of a packed row and of what follows them.

    `model` is a causal LM on which `use_packed_attention` was called. Where it does something to what its head gives,
    as a cap or a scale, all logits of the row are there at once.
    """
    inputs = {"input_ids": token_ids_T[None], "position_ids": positions_T[None], "packed_blocks": tuple(blocks)}
    if not _head_is_last(model):
        return score(model(**inputs, use_cache=False, logits_to_keep=sources_N).logits[0], targets_N)

    def scored(head: Any, hidden_1ND: torch.Tensor) -> torch.Tensor:
        size = _piece_rows(model.config.get_text_config().vocab_size, hidden_1ND)
        pieces = list(zip(torch.split(hidden_1ND[0], size), torch.split(targets_N, size), strict=True))

        def one(hidden_nD: torch.Tensor, targets_n: torch.Tensor) -> torch.Tensor:
            return score(head(hidden_nD), targets_n)

        if len(pieces) == 1 or not torch.is_grad_enabled():
            return torch.cat([one(*piece) for piece in pieces])[None]
        again = [checkpoint(one, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
        return torch.cat(again)[None]

    with _head_replaced(model, scored):
        result: torch.Tensor = model(**inputs, use_cache=False, logits_to_keep=sources_N).logits[0]
    return result


def _piece_rows(vocabulary: int, hidden: torch.Tensor) -> int:
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    return max(1, (PIECE_BYTES if device == "cpu" else PIECE_BYTES_DEVICE) // (dtype.itemsize * vocabulary))


@contextmanager
def _head_replaced(model: Any, forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """The head's module stays, so that its hooks and names do; `forward(plain, x)` is called in place of `plain(x)`."""
    head = model.get_output_embeddings()
    plain = head.forward
    own = "forward" in vars(head)
    head.forward = lambda x: forward(plain, x)
    try:
        yield
    finally:
        if own:
            head.forward = plain
        else:
            del head.forward


def _head_is_last(model: Any) -> bool:
    """Whether the model gives out what its head gives, asked once of it with a few tokens: a padding token's are 0."""
    known = getattr(model, "_headrace_head_is_last", None)
    if known is None:
        seen: list[torch.Tensor] = []

        def watched(head: Any, hidden: torch.Tensor) -> torch.Tensor:
            seen.append(head(hidden))
            return seen[-1]

        device = next(model.parameters()).device
        few = torch.arange(8, device=device)[None]
        with torch.no_grad(), _head_replaced(model, watched):
            out = model(input_ids=few, position_ids=few, packed_blocks=(Block(0, 1, (7,)),), use_cache=False)
        known = len(seen) == 1 and torch.equal(seen[0], out.logits)
        model._headrace_head_is_last = known
    return bool(known)
