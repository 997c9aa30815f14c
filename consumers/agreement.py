"""Agreement: whether the engines compute the policy that the trainer computes, and what is said when they do not."""

from __future__ import annotations

import logging

from consumers.drift import Drift
from consumers.progress import Progress
from consumers.troubles import Troubles
from headrace.config import Config

log = logging.getLogger(__name__)

LEAST_TOKENS = 128
"""Of fewer tokens no mean is judged: they are gathered over steps."""
PATIENCE = 20
"""Steps in a row without a token to compare, after which it is said that nothing can be told."""


class Agreement:
    """Judged by tokens that the very version sampled which is trained: others differ by right."""

    def __init__(self, config: Config, progress: Progress, troubles: Troubles) -> None:
        self._bound = config.trainer.engine_kl_bound
        self._progress = progress
        self._troubles = troubles
        self._kl = 0.0
        self._tokens = 0
        self._blind = 0
        """Steps in a row without a token to compare."""
        progress.agreement(disagree=False)
        self._why = "no token of them was sampled by the version that it was trained on, as at lag 0"
        if config.sampling.top_p < 1.0 or config.sampling.top_k:
            self._why = "sampling.top_p or top_k cut the distributions that engines sample from"

    def judge(self, step: int, drift: Drift) -> None:
        """After each step that was made."""
        if drift.engine_kl is None:
            self._blind += 1
            if self._blind == PATIENCE:
                self._progress.event("agreement_unknown", step=step, reason=self._why)
                log.info("of %d steps it cannot be told whether engines and trainer agree: %s", PATIENCE, self._why)
            return
        self._blind = 0
        self._kl += drift.engine_kl * drift.engine_tokens
        self._tokens += drift.engine_tokens
        if self._tokens < LEAST_TOKENS:
            return
        kl, tokens, self._kl, self._tokens = self._kl / self._tokens, self._tokens, 0.0, 0
        self._progress.agreement(disagree=kl > self._bound)
        if kl <= self._bound:
            self._troubles.end("engine")
        elif "engine" not in self._troubles:
            self._progress.event("disagreement", step=step, kl=round(kl, 6), tokens=tokens)
            self._troubles.begin("engine", sentence(step, kl, tokens, self._bound))


def sentence(step: int, kl: float, tokens: int, bound: float) -> str:
    return (
        f"engines and trainer disagree about the policy: at step {step}, over {tokens} tokens that the trained version "
        f"itself sampled, the KL from engine to trainer is {kl:.3g} nats per token, above trainer.engine_kl_bound = "
        f"{bound:g}; compare model.dtype, the engine's options and its weights (`headrace weights list`) with the "
        "trainer's, or raise the bound"
    )
