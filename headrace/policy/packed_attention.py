"""Attention over rows of blocks (`headrace/policy/blocks.py`), registered with transformers as "headrace_packed".

Each block is attended by itself, so nothing is computed between groups. A short block is one masked product, which
is fastest on a CPU; in a long one the prefix and each suffix are products of their own, so that no suffix is
computed against another. Suffixes: H heads, K key-value heads, L tokens of a block, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from headrace.errors import ModelError
from headrace.policy.blocks import Block

NAME = "headrace_packed"
ONE_PRODUCT = 512
"""Blocks of at most this many tokens are one masked product."""
UNKNOWN = ("softcap", "s_aux", "position_bias")
"""What other attentions add to the plain one; a model that uses it is refused, not computed wrongly."""


def use_packed_attention(model: Any) -> None:
    """Let `model` (a transformers causal LM) take rows of blocks. Raises ModelError when it cannot."""
    from transformers import AttentionInterface

    if not model._can_set_attn_implementation() or not getattr(model, "_supports_attention_backend", False):
        raise ModelError(
            f"{type(model).__name__} does not take a custom attention function, "
            "which the trainer needs to share prompts"
        )
    AttentionInterface.register(NAME, packed_attention)
    model.set_attn_implementation(NAME)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    packed_blocks: Sequence[Block],
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers: query [1, H, T, D], key and value [1, K, T, D] to [1, T, H, D].

    `packed_blocks` cover the T tokens in order. Raises ModelError for a model whose attention is not the plain one.
    """
    unknown = [name for name in UNKNOWN if options.get(name) is not None]
    window = options.get("sliding_window")
    if window is not None and window < max(block.prefix + max(block.suffixes) for block in packed_blocks):
        unknown.append(f"a sliding window of {window} tokens")
    if unknown:
        raise ModelError(f"{type(module).__name__} uses {unknown[0]}, which the trainer's attention does not know")
    lengths = [block.length for block in packed_blocks]
    dtype = value.dtype
    parts = zip(
        packed_blocks,
        torch.split(query[0].to(dtype), lengths, dim=1),
        torch.split(key[0].to(dtype), lengths, dim=1),
        torch.split(value[0], lengths, dim=1),
        strict=True,
    )
    outputs = [
        (_masked if block.length <= ONE_PRODUCT and q_HLD.device.type == "cpu" else _split)(
            block, q_HLD, k_KLD, v_KLD, scaling
        )
        for block, q_HLD, k_KLD, v_KLD in parts
    ]
    return torch.cat(outputs, dim=1).transpose(0, 1)[None], None


def _masked(
    block: Block, q_HLD: torch.Tensor, k_KLD: torch.Tensor, v_KLD: torch.Tensor, scaling: float
) -> torch.Tensor:
    """The whole block as one product under its mask. Heads that share keys are rows of the same product."""
    heads, length, dim = q_HLD.shape
    kv_heads = k_KLD.shape[0]
    bias_LL = _bias(block.prefix, block.suffixes, q_HLD.dtype)
    rows_KRD = q_HLD.reshape(kv_heads, -1, dim)
    bias_1RL = bias_LL.repeat(heads // kv_heads, 1)[None]
    scores_KRL = torch.baddbmm(bias_1RL, rows_KRD, k_KLD.transpose(1, 2), alpha=scaling)
    weights_KRL = scores_KRL.softmax(dim=-1, dtype=torch.float32).to(v_KLD.dtype)
    return torch.bmm(weights_KRL, v_KLD).view(heads, length, dim)


def _split(block: Block, q_HLD: torch.Tensor, k_KLD: torch.Tensor, v_KLD: torch.Tensor, scaling: float) -> torch.Tensor:
    """Prefix and suffixes one by one: a suffix attends to the prefix's keys and its own."""
    sizes = [block.prefix, *block.suffixes]
    queries, keys, values = (torch.split(x, sizes, dim=1) for x in (q_HLD, k_KLD, v_KLD))
    outputs = []
    for index, q in enumerate(queries):
        if q.shape[1] == 0:
            continue
        before = index > 0 and block.prefix > 0
        k = torch.cat([keys[0], keys[index]], dim=1) if before else keys[index]
        v = torch.cat([values[0], values[index]], dim=1) if before else values[index]
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril(k.shape[1] - q.shape[1])
        out = scaled_dot_product_attention(
            q[None],
            k[None],
            v[None],
            attn_mask=mask if before else None,
            is_causal=not before,
            scale=scaling,
            enable_gqa=q.shape[0] != k.shape[0],
        )
        outputs.append(out[0])
    return torch.cat(outputs, dim=1)


@lru_cache(maxsize=256)
def _bias(prefix: int, suffixes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """[L, L]: 0 where a token sees another, -inf where not."""
    sizes = torch.tensor([prefix, *suffixes])
    part_L = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    sees_LL = (part_L[:, None] == part_L[None]) | (part_L[None] == 0)
    sees_LL &= torch.ones_like(sees_LL).tril()
    return torch.zeros(sees_LL.shape, dtype=dtype).masked_fill_(~sees_LL, float("-inf"))
