"""Engine "sglang": several SGLang servers as one engine, started here or given by URL."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from headrace.secret import secret
from producers.engines.api import SamplingParams
from producers.engines.remote.job import MOST_TOKENS
from producers.engines.remote.servers import ServersEngine
from producers.engines.sglang.launch import LaunchSpec
from producers.engines.sglang.options import Options, server_flags
from producers.engines.sglang.place import Place
from producers.engines.sglang.probing import probe, sampling_fault
from producers.engines.sglang.replica import SglangReplica
from producers.engines.sglang.traits import traits
from producers.engines.stops import Decode
from producers.engines.traits import Traits, agreed

KEY_VARIABLE = "HEADRACE_SGLANG_KEY"
"""Admin key of the servers that are given by URL; or, with `_FILE` behind the name, the file that holds it."""


class SglangEngine(ServersEngine[SglangReplica]):
    """Decodes on servers, at most `slots` requests at once."""

    kind, makes = "sglang", "SGLang"

    def __init__(
        self,
        folder: Path,
        options: Options,
        *,
        slots: int = 32,
        context_length: int = 512,
        dtype: str = "auto",
        seed: int = 0,
        decode: Decode | None = None,
    ) -> None:
        """`folder`: the model's. `decode`: token ids to text, for stop strings that begin in one request to a server
        and end in the next.

        Raises ConfigError for a file with the servers' key that cannot be read.
        """
        super().__init__(
            folder,
            options.kv,
            slots=slots,
            context_length=context_length,
            seed=seed,
            decode=decode,
            devices=options.devices,
        )
        self._options, self._dtype = options, dtype
        self._key = secret(KEY_VARIABLE, os.environ) if options.urls else ""
        self._logs: Path | None = None

    def join_run(self, run_id: str, folder: str) -> None:
        """Before `start`: whose versions these are, and where the output of servers belongs; "" is nowhere."""
        super().join_run(run_id, folder)
        self._logs = Path(folder) / "logs" if folder and Path(folder).is_dir() else None

    async def traits(self) -> Traits:
        return agreed([traits(replica.info, self._options.server_args) for replica in self.replicas])

    def _make_replicas(self) -> tuple[SglangReplica, ...]:
        return tuple(self._replica(index) for index in range(self._options.servers))

    async def _accept(self, replica: SglangReplica) -> None:
        await probe(replica.client, replica.info, self._options.kv)

    def _fit(self) -> None:
        self._slots = self._dispatcher.slots = min(self._slots, sum(replica.running for replica in self.replicas))
        self._dispatcher.slots += sum(replica.most - min(replica.most, replica.running) for replica in self.replicas)
        longest = min(_longest(replica.info) for replica in self.replicas)
        self._context_length = min(self._context_length, longest)

    def _fault(self, sampling: SamplingParams) -> str | None:
        return sampling_fault(sampling.temperature, sampling.top_p, sampling.top_k)

    def _replica(self, index: int) -> SglangReplica:
        options = self._options
        if options.urls:
            name, url = options.urls[index], options.urls[index]
            place = Place(name, options, url=url, key=self._key)
        else:
            name = f"sglang-{secrets.token_hex(2)}-{index}"
            args, env = options.numbered(index)
            flags = server_flags(args, options.kv, self._dtype)
            spec = LaunchSpec(self._folder, options.python, (*flags, *args), env, self._logs, options.start_s)
            place = Place(name, options, spec=spec)
        return SglangReplica(name, place, options, self._labels, self._slots, self._changed_replica)


def _longest(info: dict[str, Any]) -> int:
    """Prompt and completion together, at this server: it takes prompts that are shorter than this."""
    return int(info.get("max_req_input_len") or MOST_TOKENS)
