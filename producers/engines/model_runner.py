"""One forward pass over the slots: a Hugging Face causal LM, its own modules, and our cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from headrace.errors import ModelError
from headrace.policy.intensity import shape_of
from producers.engines.kv_pages import PAGE, Ints, PagePool, PageTable
from producers.engines.sequences import Copy
from producers.engines.slot_attention import NAME, Chunk, plan_attention, slot_attention, token_places

LAYERS = ("full_attention", "sliding_attention")


class ModelRunner:
    """Owns the page pool of one model. All methods are called on one thread."""

    def __init__(self, model: Any, slots: int, context_length: int) -> None:
        """Raises ModelError for a model that this engine does not serve."""
        from transformers import AttentionInterface

        config = model.config.get_text_config()
        _check(model, config, context_length)
        AttentionInterface.register(NAME, slot_attention)
        model.set_attn_implementation(NAME)
        heads = config.num_attention_heads
        parameter = next(model.parameters())
        self._model = model
        self._device = parameter.device
        self.vocabulary: int = config.vocab_size
        self.table = PageTable(slots, context_length)
        self._pool = PagePool(
            layers=config.num_hidden_layers,
            pages=self.table.pages,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=parameter.dtype,
            device=self._device,
        )
        self.wide_context = _wide_context(model, config)
        self.kv_bytes_per_token = self._pool.nbytes // (self.table.pages * PAGE)
        self.shape = shape_of(model)
        self.itemsize = parameter.dtype.itemsize
        """Bytes of a value of the compute dtype."""

    def free(self) -> None:
        """Give the cache's memory back; no slot holds anything. Until `reserve`."""
        self._pool.free()

    def reserve(self) -> None:
        """Have the cache's memory, where it was given back."""
        if not self._pool.memory.numel():
            self._pool.reserve()

    def copy_prompt(self, copy: Copy) -> None:
        """Give `copy.target` the pages of the first `copy.count` tokens of `copy.source`."""
        self.table.grow(copy.target, copy.count)
        pages = -(-copy.count // PAGE)
        self._pool.copy(self.table.held(copy.source)[:pages], self.table.held(copy.target)[:pages])

    @torch.inference_mode()
    def forward(
        self, decode_slots_B: Ints, lengths_B: Ints, chunks: list[Chunk], token_ids_T: Ints, sample_rows_R: Ints
    ) -> torch.Tensor:
        """Logits [R, V] of the rows that sample, in the compute dtype.

        The T tokens are one per decoding slot, then the chunks' in order; `lengths_B` are the contexts of the decoding
        slots with their new token.
        """
        for slot, length in zip(decode_slots_B, lengths_B, strict=True):
            self.table.grow(int(slot), int(length))
        for chunk in chunks:
            self.table.grow(chunk.slot, chunk.start + chunk.count)
        step = plan_attention(self._pool, self.table, decode_slots_B, lengths_B, chunks)
        _, positions_T = token_places(decode_slots_B, lengths_B, chunks)
        out = self._model(
            input_ids=self._tensor(token_ids_T)[None],
            position_ids=self._tensor(positions_T)[None],
            use_cache=False,
            logits_to_keep=self._tensor(sample_rows_R),
            headrace_step=step,
        )
        logits_RV: torch.Tensor = out.logits[0]
        return logits_RV

    def _tensor(self, values: Ints) -> torch.Tensor:
        return torch.as_tensor(np.ascontiguousarray(values), device=self._device)


def _wide_context(model: Any, config: Any) -> int:
    """The context, in tokens, whose attention costs a prompt's token as much as all else, by arithmetic.

    Attention's products, with the softmax between them, run at about half the rate of the others.
    """
    linear = sum(one.numel() for one in model.parameters()) - model.get_input_embeddings().weight.numel()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return max(1, int(linear // (4 * config.num_hidden_layers * width)))


def _check(model: Any, config: Any, context_length: int) -> None:
    name = type(model).__name__
    if not model._can_set_attn_implementation() or not getattr(model, "_supports_attention_backend", False):
        raise ModelError(f"{name} does not take a custom attention function, which the torch engine's slots need")
    other = [kind for kind in getattr(config, "layer_types", None) or () if kind not in LAYERS]
    if other:
        raise ModelError(f"{name} has {other[0]} layers; the torch engine serves models with plain attention only")
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and window < context_length:
        raise ModelError(
            f"{name} attends to a sliding window of {window} tokens; set model.context_length to at most that"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest and context_length > longest:
        raise ModelError(f"model.context_length = {context_length} is more than the {longest} positions of {name}")
