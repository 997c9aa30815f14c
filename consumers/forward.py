"""Forward passes over packed rows: of the policy, with gradient or without, and of the reference model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from consumers.packing import Row
from headrace.policy.entropy import chosen_logprobs_and_entropy
from headrace.policy.intensity import shape_of
from headrace.policy.logprobs import chosen_logprobs, packed_logits
from headrace.policy.packed_attention import use_packed_attention
from headrace.telemetry.arithmetic import block_contexts
from headrace.telemetry.phases import Lane


class Forward:
    """One model on the trainer's lane."""

    def __init__(self, model: Any, lane: Lane, temperature: float, *, autocast: bool) -> None:
        """`model` is a transformers causal LM. Raises ModelError when it cannot share prompts."""
        use_packed_attention(model)
        self.model = model
        self.shape = shape_of(model)
        self.device = next(model.parameters()).device
        self._lane = lane
        self._temperature = temperature or 1.0
        self._autocast = autocast

    def logprobs(self, row: Row) -> torch.Tensor:
        """float32 [N]: log-probs of the row's targets."""
        return chosen_logprobs(self._logits(row), self.tensor(row.targets_N), self._temperature)

    def logprobs_and_entropy(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [N] each: the same, and entropies of the distributions that the targets are drawn from."""
        return chosen_logprobs_and_entropy(self._logits(row), self.tensor(row.targets_N), self._temperature)

    @torch.no_grad()
    def frozen(self, rows: Sequence[Row], phase: str) -> list[torch.Tensor]:
        """float32 [N] per row: log-probs without gradient, in a phase of their own."""
        with self._lane.during(phase):
            found = [self.logprobs(row) for row in rows]
        for row in rows:
            flop = self.shape.forward_flop(row.token_ids_T.size, contexts_of(row), row.targets_N.size)
            self._lane.did(phase, flop, self.shape.weight_bytes(self.itemsize))
        return found

    def trained(self, row: Row) -> None:
        """A row went forward and backward."""
        flop = self.shape.train_flop(row.token_ids_T.size, contexts_of(row), row.targets_N.size)
        self._lane.did("forward_backward", flop, self.shape.train_bytes(self.itemsize))

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the type that products are computed in."""
        return 2 if self._autocast else 4

    def tensor(self, values: Any) -> torch.Tensor:
        """A column of a row, on the model's device."""
        return torch.from_numpy(values).to(self.device)

    def _logits(self, row: Row) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            return packed_logits(
                self.model,
                self.tensor(row.token_ids_T),
                self.tensor(row.positions_T),
                row.blocks,
                self.tensor(row.sources_N),
            )


def contexts_of(row: Row) -> int:
    """Positions that the row's tokens attend to, summed."""
    return sum(block_contexts(block.prefix, block.suffixes) for block in row.blocks)
