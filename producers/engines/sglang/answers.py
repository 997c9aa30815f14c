"""What an SGLang server answers, as far as this engine reads it, beside the tokens of `remote/answers.py`."""

from __future__ import annotations

import msgspec

from producers.engines.remote.answers import Generated
from producers.engines.remote.refill import Load


class _RankLoad(msgspec.Struct, frozen=True):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0
    max_running_requests: int = 0


class Loads(msgspec.Struct, frozen=True):
    """The answer of /v1/loads: one entry per data-parallel rank."""

    loads: list[_RankLoad]

    def total(self, retractions: int = 0) -> Load:
        return Load(
            running=sum(rank.num_running_reqs for rank in self.loads),
            queued=sum(rank.num_waiting_reqs for rank in self.loads),
            used_tokens=sum(rank.num_used_tokens for rank in self.loads),
            capacity_tokens=sum(rank.max_total_num_tokens for rank in self.loads),
            max_running=sum(rank.max_running_requests for rank in self.loads),
            retractions=retractions,
        )


generated_decoder = msgspec.json.Decoder(Generated)
loads_decoder = msgspec.json.Decoder(Loads)
