"""How servers' time is split between prompts and decoding, where only tokens are counted. Estimated; pure.

A request whose prompt has p tokens to compute and that samples d takes about a p + b d seconds. Both rates are fitted
to the requests that have ended, newer ones counting more: least squares without an intercept, by the normal equations.
Sequences decode together, so of a server's own time a sampled token takes b over the number that decode beside each
other; a prompt is computed by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

MEMORY = 0.99
"""Share of what was measured that the next request leaves."""


@dataclass(slots=True)
class Rates:
    """Fitted to requests."""

    _pp: float = 0.0
    _pd: float = 0.0
    _dd: float = 0.0
    _ps: float = 0.0
    _ds: float = 0.0
    """Sums of products: prompt tokens, sampled tokens, seconds."""

    def note(self, prompt: int, sampled: int, seconds: float) -> None:
        """A request has ended that computed so many tokens of its prompt, and sampled so many."""
        for name, product in (
            ("_pp", prompt * prompt),
            ("_pd", prompt * sampled),
            ("_dd", sampled * sampled),
            ("_ps", prompt * seconds),
            ("_ds", sampled * seconds),
        ):
            setattr(self, name, MEMORY * getattr(self, name) + product)

    @property
    def seconds(self) -> tuple[float, float]:
        """Of one token of a prompt, and of one that is sampled. (0, 0) while nothing is known."""
        determinant = self._pp * self._dd - self._pd * self._pd
        if determinant > 1e-9 * self._pp * self._dd:
            prompt = (self._ps * self._dd - self._ds * self._pd) / determinant
            sampled = (self._ds * self._pp - self._ps * self._pd) / determinant
            if prompt >= 0 and sampled >= 0:
                return prompt, sampled
        # All alike, or noise: what is not told apart counts as decoding, which is most of it.
        return 0.0, max(0.0, self._ds / self._dd) if self._dd else 0.0

    def shares(self, prefilled: int, recomputed: int, decoded: int, together: float) -> list[tuple[str, float]]:
        """What of some time went where, in which so many tokens were computed and sampled, by so many sequences that
        decode `together` (at least 1). Only decoding, where nothing is known.
        """
        prompt_s, sampled_s = self.seconds
        spent = {
            "prefill": prompt_s * prefilled,
            "recompute": prompt_s * recomputed,
            "decode": sampled_s * decoded / max(1.0, together),
        }
        total = sum(spent.values())
        return [(phase, part / total) for phase, part in spent.items() if part] if total else [("decode", 1.0)]
