"""Engine "openai": servers with OpenAI's completion API that take and return token ids, with their log-probs (vLLM).

A new version ends what a server computes: each request goes on under it behind the tokens so far, with keys and values
computed anew (spans `fresh`).
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError, EngineError, WeightError
from headrace.secret import secret
from headrace.version import PolicyVersion
from producers.engines.api import SamplingParams
from producers.engines.openai.options import Options
from producers.engines.openai.replica import CompletionsReplica
from producers.engines.openai.traits import ask
from producers.engines.remote.job import MOST_TOKENS
from producers.engines.remote.servers import ServersEngine
from producers.engines.stops import Decode
from producers.engines.traits import Traits, agreed
from weightsync.manifest import Layout

_ONE_VERSION = (
    'producer.engine_options.updates = "none": the servers sample from the weights that they serve, for evaluation and '
    'generation alone; to train, set updates = "auto"'
)


class OpenAIEngine(ServersEngine[CompletionsReplica]):
    """Decodes on servers that are there already, at most `slots` requests at once."""

    kind, makes = "openai", "OpenAI-compatible"

    def __init__(
        self,
        folder: Path,
        options: Options,
        *,
        slots: int = 32,
        context_length: int = 512,
        seed: int = 0,
        sampling: SamplingParams | None = None,
        decode: Decode | None = None,
    ) -> None:
        """`folder`: the model's. `sampling`: how requests will be sampled, which the servers are asked about at start.
        `decode`: token ids to text, for stop strings that begin in one request to a server and end in the next.

        Raises ConfigError where the variable with the servers' key is not set.
        """
        super().__init__(
            folder,
            "resume",
            slots=slots,
            context_length=context_length,
            seed=seed,
            decode=decode,
            devices=options.devices,
        )
        self._options, self._sampling = options, sampling
        self._key = _key(options.api_key_env)

    def back_buffer(self, layout: Layout) -> npt.NDArray[np.uint8]:
        if self._options.updates == "none":
            raise WeightError(_ONE_VERSION)
        return super().back_buffer(layout)

    async def commit(self, version: PolicyVersion) -> float:
        """As of every engine over servers; one that is not updated has the first version for ever."""
        if self._options.updates == "none" and self._version not in (None, version):
            raise WeightError(_ONE_VERSION)
        return await super().commit(version)

    async def traits(self) -> Traits:
        return agreed(await asyncio.gather(*(ask(replica.client) for replica in self.replicas)))

    def _make_replicas(self) -> tuple[CompletionsReplica, ...]:
        return tuple(
            CompletionsReplica(url, self._key, self._options, self._labels, self._slots, self._changed_replica)
            for url in self._options.urls
        )

    async def _accept(self, replica: CompletionsReplica) -> None:
        assert replica.found is not None
        if self._sampling is not None and (fault := replica.found.fault(self._sampling)):
            raise EngineError(f"{replica.name}: {fault}")

    def _fit(self) -> None:
        lengths = (replica.found.context_length for replica in self.replicas if replica.found is not None)
        self._context_length = min(self._context_length, *(length or MOST_TOKENS for length in lengths))

    def _fault(self, sampling: SamplingParams) -> str | None:
        found = (replica.found.fault(sampling) for replica in self.replicas if replica.found is not None)
        return next((fault for fault in found if fault is not None), None)


def _key(variable: str) -> str:
    if variable and not secret(variable, os.environ):
        raise ConfigError(
            f"producer.engine_options.api_key_env = {variable!r}: this variable is not set, nor is {variable}_FILE"
        )
    return secret(variable, os.environ) if variable else ""
