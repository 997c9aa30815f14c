"""Forward passes over packed rows: of the policy, with gradient or without, and of the reference model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from consumers.packing import Row
from headrace.config_trainer import TrainerConfig
from headrace.policy.dtype import compute_dtype
from headrace.policy.entropy import chosen_logprobs_and_entropy
from headrace.policy.head import Score, packed_scores
from headrace.policy.intensity import shape_of
from headrace.policy.logprobs import chosen_logprobs
from headrace.policy.packed_attention import use_packed_attention
from headrace.telemetry.arithmetic import block_contexts
from headrace.telemetry.phases import Lane

PROBE_ROWS = 512
"""Most rows of the product that decides about autocast."""


class Forward:
    """One model on the trainer's lane."""

    def __init__(self, model: Any, lane: Lane, temperature: float, *, autocast: bool) -> None:
        """`model` is a transformers causal LM. Raises ModelError when it cannot share prompts."""
        use_packed_attention(model)
        self.model = model
        self.shape = shape_of(model)
        self._lane = lane
        self._temperature = temperature or 1.0
        self._autocast = autocast

    def logprobs(self, row: Row) -> torch.Tensor:
        """float32 [N]: log-probs of the row's targets."""

        def score(logits_nV: torch.Tensor, targets_n: torch.Tensor) -> torch.Tensor:
            return chosen_logprobs(logits_nV, targets_n, self._temperature)[:, None]

        return self._scores(row, score)[:, 0]

    def logprobs_and_entropy(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [N] each: the same, and entropies of the distributions that the targets are drawn from."""

        def score(logits_nV: torch.Tensor, targets_n: torch.Tensor) -> torch.Tensor:
            return torch.stack(chosen_logprobs_and_entropy(logits_nV, targets_n, self._temperature), dim=1)

        logprobs_N, entropy_N = self._scores(row, score).unbind(1)
        return logprobs_N, entropy_N

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
    def device(self) -> torch.device:
        """Of the model's parameters, which move where they are spread over ranks."""
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the type that products are computed in."""
        return 2 if self._autocast else 4

    def tensor(self, values: Any) -> torch.Tensor:
        """A column of a row, on the model's device."""
        return torch.from_numpy(values).to(self.device)

    def _scores(self, row: Row, score: Score) -> torch.Tensor:
        """[N, C]: `score` of the row's targets."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            columns = (row.token_ids_T, row.positions_T, row.sources_N, row.targets_N)
            ids_T, positions_T, sources_N, targets_N = map(self.tensor, columns)
            return packed_scores(self.model, ids_T, positions_T, row.blocks, sources_N, targets_N, score)


def contexts_of(row: Row) -> int:
    """Positions that the row's tokens attend to, summed."""
    return sum(block_contexts(block.prefix, block.suffixes) for block in row.blocks)


def autocast(config: TrainerConfig, model: Any, device: str) -> bool:
    """Whether matrix products run in bfloat16: as configured, or where a short measurement says that it pays."""
    if config.autocast != "auto":
        return config.autocast == "bfloat16"
    hidden = int(model.config.hidden_size)
    intermediate = int(getattr(model.config, "intermediate_size", None) or 4 * hidden)
    return compute_dtype("auto", device, hidden, intermediate, min(config.token_budget, PROBE_ROWS)) == "bfloat16"
