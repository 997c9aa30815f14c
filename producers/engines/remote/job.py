"""One `generate` on its way through the servers: what they are asked, and what their answers add up to.

A job is one or more requests to servers, one after the other: where one ends before the job does (its server aborts it
for new weights, or ends at a token that is no stop token of ours), the next goes on behind the tokens so far. Tokens
are carried as the ids that the server sampled.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

import numpy as np

from broker.messages import FinishReason, VersionSpan
from headrace.version import PolicyVersion
from producers.engines.api import Completion, Progress, Request
from producers.engines.remote.answers import Generated
from producers.engines.remote.http import ServerBroken, shortened
from producers.engines.remote.spans import Kv, Labels, cut_spans, join_spans, segment_spans, whole_segment
from producers.engines.stops import SLACK, Decode, completes_stop

NOT_A_NUMBER = "NaN happened"
"""What the server says that it stopped at where the weights gave no probabilities."""
SEED_BITS = (1 << 63) - 1
MOST_TOKENS = 1 << 30
LOWEST, HIGHEST = -1e30, 1e-2
"""Of a log-prob: one of 32 bits, and no probability above 1 but by rounding."""


@dataclass(slots=True, eq=False)
class Job:
    """Of one request. `limit`: tokens that may be sampled."""

    request: Request
    key: str
    """What it shares with the other members of its group."""
    seed: int
    limit: int
    done: asyncio.Future[Completion]
    asked_at: float
    vocabulary: int = MOST_TOKENS
    slot_at: float = 0.0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: tuple[VersionSpan, ...] = ()
    tries: int = 0
    """Requests that gave nothing, for no reason of ours."""
    asked: PolicyVersion | None = None
    """What its server was on when it was last asked."""
    aborted: bool = False

    @property
    def filtered(self) -> bool:
        """Whether it is sampled from less than the whole distribution."""
        sampling = self.request.sampling
        return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)

    def add(self, got: Generated, labels: Labels, kv: Kv, reached: PolicyVersion | None) -> int | None:
        """Take over what a server sampled; how many tokens that are. None: their versions are not known, none is taken.

        `reached` is the version that the server is on now. Raises ServerBroken for an answer that does not add up.
        """
        assert self.asked is not None
        count = len(got.output_ids)
        logprobs = self._logprobs(got)
        reported = got.meta_info.weight_versions
        if reported is None:
            spans = whole_segment(count, self.asked, reached)
        else:
            spans = segment_spans(
                count, self.asked, [(one.version, one.start, one.end) for one in reported], labels, kv
            )
        if spans is None:
            return None
        self.tokens += got.output_ids
        self.logprobs += logprobs
        self.spans = join_spans((self.spans, spans))
        return count

    def ended(self, got: Generated, decode: Decode | None, before: int) -> FinishReason | None:
        """How the job has ended with an answer that was added behind `before` tokens; None where it goes on."""
        finish = got.meta_info.finish_reason
        assert finish is not None
        if before and self._cut_at_stop(before, decode):
            return "stop"
        if self.aborted:
            return "abort"
        if finish.type == "stop" and (isinstance(finish.matched, str) or self._at_stop_token()):
            return "stop"
        if finish.type == "length" or len(self.tokens) >= self.limit:
            return "length"
        return None

    def progress(self) -> Progress:
        """Tokens of the request that is under way are not known yet; it counts as begun."""
        return Progress(len(self.tokens), self.spans[0].version if self.spans else self.asked)

    def complete(self, reason: FinishReason, now: float, why: str = "") -> None:
        """Whoever waits has it now; nothing where it was complete already. `why`: of an "abort"."""
        if self.done.done():
            return
        slot_at = self.slot_at or now
        self.done.set_result(
            Completion(
                request_id=self.request.request_id,
                token_ids_N=np.array(self.tokens, np.int32),
                logprobs_N=np.array(self.logprobs, np.float32),
                spans=self.spans,
                finish_reason=reason,
                queue_s=slot_at - self.asked_at,
                decode_s=now - slot_at,
                why=why,
            )
        )

    def _logprobs(self, got: Generated) -> list[float]:
        """Of the distribution that was sampled from. Raises ServerBroken."""
        meta, count = got.meta_info, len(got.output_ids)
        if meta.finish_reason is None:
            raise ServerBroken(f"the answer to {self.request.request_id} says not why it ended")
        if meta.finish_reason.matched == NOT_A_NUMBER:
            raise ServerBroken("its model gives no probabilities (not a number)")
        if count > (most := self.limit - len(self.tokens)):
            raise ServerBroken(f"the answer to {self.request.request_id} has {count} tokens, where {most} were to come")
        plain = meta.output_token_logprobs or []
        if [token for _, token, _ in plain] != got.output_ids:
            raise ServerBroken(
                f"the answer to {self.request.request_id} has {count} tokens and log-probs of {len(plain)} others"
            )
        if strange := [token for token in got.output_ids if not 0 <= token < self.vocabulary]:
            raise ServerBroken(
                f"the answer to {self.request.request_id} has token {shortened(str(strange[0]))}, which is not in the "
                f"model's vocabulary of {self.vocabulary}"
            )
        told = [logprob for logprob, _, _ in plain]
        if self.filtered:
            told = meta.output_token_sampling_logprobs or []
            if len(told) != count:
                raise ServerBroken(
                    f"the answer to {self.request.request_id} lacks the log-probs after top-k and top-p "
                    "(return_sampling_mask)"
                )
        known = [logprob for logprob in told if logprob is not None and math.isfinite(logprob)]
        if len(known) < count:
            raise ServerBroken(f"the answer to {self.request.request_id} has a log-prob that is no number")
        if outside := [logprob for logprob in known if not LOWEST <= logprob <= HIGHEST]:
            raise ServerBroken(f"the answer to {self.request.request_id} has {outside[0]!r}, which is no log-prob")
        return known

    def _at_stop_token(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self.request.sampling.stop_token_ids

    def _cut_at_stop(self, before: int, decode: Decode | None) -> bool:
        """A stop string that began before the newest request, which its server could not see: cut behind its end."""
        stop = self.request.sampling.stop
        if not stop or decode is None:
            return False
        reach = max(len(text.encode()) for text in stop) + SLACK
        for count in range(before + 1, min(len(self.tokens), before + reach) + 1):
            if completes_stop(self.tokens[:count], stop, decode):
                del self.tokens[count:], self.logprobs[count:]
                self.spans = cut_spans(self.spans, count)
                return True
        return False
