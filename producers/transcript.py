"""The tokens of one rollout as they come: what was shown, what was sampled, and from which weights."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from broker.messages import FinishReason, Float32, Int32, Trajectory, VersionSpan
from headrace.telemetry.clock import now
from headrace.version import PolicyVersion
from producers.engines.api import Completion


class Transcript:
    """Grows by observations, which are masked out of the loss, and completions, kept as they were sampled."""

    def __init__(self) -> None:
        self._tokens: list[Int32] = []
        self._logprobs: list[Float32] = []
        self._sampled: list[bool] = []
        self._spans: list[VersionSpan] = []
        self._length = 0
        self.request_id = ""
        """The request whose completion comes next, while there is one."""
        self.first_at = 0.0
        """When its first token was sampled, in seconds since the epoch; its slot, where the engine does not say."""
        self.lost = 0
        """Tokens that were sampled for it and are not in it: of requests that were aborted."""

    def __len__(self) -> int:
        return self._length

    @property
    def sampled(self) -> int:
        """Tokens that the model sampled for it, lost ones included."""
        return self.lost + sum(
            len(tokens) for tokens, sampled in zip(self._tokens, self._sampled, strict=True) if sampled
        )

    @property
    def oldest(self) -> PolicyVersion | None:
        """The version of fewest steps that sampled one of its tokens; None before the first completion."""
        return min((span.version for span in self._spans), key=lambda version: version.step, default=None)

    def token_ids(self) -> Int32:
        """[T], all tokens so far."""
        return _joined(self._tokens, np.int32)

    def observe(self, token_ids_N: Int32) -> None:
        """Append tokens that the model was shown."""
        self._append(token_ids_N, np.zeros(len(token_ids_N), np.float32), sampled=False)

    def complete(self, completion: Completion) -> None:
        """Append tokens that the model sampled; spans are shifted to their place in the whole."""
        shifted = (
            span._replace(start=span.start + self._length, end=span.end + self._length) for span in completion.spans
        )
        self._spans = _merged([*self._spans, *shifted])
        asked_at = now() - completion.queue_s - completion.decode_s
        self.first_at = self.first_at or asked_at + (completion.first_token_s or completion.queue_s)
        self._append(completion.token_ids_N, completion.logprobs_N, sampled=True)

    def trajectory(self, reward: float, finish_reason: FinishReason, correct: bool | None = None) -> Trajectory:
        lengths = [len(part) for part in self._tokens]
        return Trajectory(
            token_ids_T=self.token_ids(),
            logprobs_T=_joined(self._logprobs, np.float32),
            loss_mask_T=np.repeat(np.array(self._sampled, np.bool_), lengths),
            spans=tuple(self._spans),
            reward=reward,
            finish_reason=finish_reason,
            correct=correct,
        )

    def _append(self, token_ids_N: Int32, logprobs_N: Float32, *, sampled: bool) -> None:
        self._tokens.append(np.asarray(token_ids_N, np.int32))
        self._logprobs.append(np.asarray(logprobs_N, np.float32))
        self._sampled.append(sampled)
        self._length += len(token_ids_N)


def _merged(spans: Iterable[VersionSpan]) -> list[VersionSpan]:
    """Spans that touch and agree become one."""
    merged: list[VersionSpan] = []
    for span in spans:
        last = merged[-1] if merged else None
        if last and (last.end, last.version, last.kv) == (span.start, span.version, span.kv):
            merged[-1] = last._replace(end=span.end)
        else:
            merged.append(span)
    return merged


def _joined(parts: list, dtype: type) -> np.ndarray:  # type: ignore[type-arg]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
