"""`producer.engine_options` of engine "sglang"."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pydantic import Field, model_validator

from producers.engines.remote.options import Seconds, ServerOptions
from producers.engines.remote.spans import Kv
from producers.engines.sglang.loading import MeansName


class Options(ServerOptions):
    """Either `urls` or `launch`, the rest has defaults.

    The admin key of servers given by URL is told in the environment (`engine.KEY_VARIABLE`): what stands here is stored
    with the run.
    """

    launch: int = Field(0, ge=0, le=64)
    """Servers that the producer starts, on this machine."""
    python: str = sys.executable
    """Interpreter that has SGLang, for `launch`."""
    server_args: tuple[str, ...] = ()
    """Added to the command of each; "{index}" in one is the server's number, from 0."""
    server_env: dict[str, str] = Field(default_factory=dict)
    """Added to the environment of each; "{index}" as above."""
    start_s: Seconds = 900.0
    """Until a server that was started answers."""
    kv: Kv = "keep"
    """What a new version makes of running requests: "keep" or "recompute" their keys and values, or "resume" them as
    new requests with the tokens that they have."""
    means: MeansName = "auto"
    """How weights come into a server."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Options:
        if bool(self.urls) == bool(self.launch):
            raise ValueError("either urls or launch must be set, and only one of them")
        return self

    @property
    def servers(self) -> int:
        return len(self.urls) or self.launch

    def numbered(self, index: int) -> tuple[tuple[str, ...], dict[str, str]]:
        """Arguments and environment of one of the servers that are started."""
        number = str(index)
        args = tuple(arg.replace("{index}", number) for arg in self.server_args)
        return args, {name: value.replace("{index}", number) for name, value in self.server_env.items()}


def server_flags(args: Sequence[str], kv: Kv, dtype: str) -> tuple[str, ...]:
    """What a server that is started needs beside what the user names."""
    flags: list[str] = []
    if kv == "keep" and "--disable-overlap-schedule" not in args:
        # Else a step that was begun under the old weights would be booked under the new ones.
        flags.append("--disable-overlap-schedule")
    if dtype != "auto" and not any(arg.split("=")[0] == "--dtype" for arg in args):
        flags += ["--dtype", dtype]
    return tuple(flags)
