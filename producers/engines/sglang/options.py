"""`producer.engine_options` of engine "sglang"."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from headrace.config import Section
from producers.engines.options import Seconds, Url, parsed
from producers.engines.sglang.spans import Kv


class Options(Section):
    """Either `urls` or `launch`, the rest has defaults."""

    urls: tuple[Url, ...] = Field((), max_length=64)
    """Servers that are there already, as "http://host:port". Their admin key, where they have one, is told in the
    environment as HEADRACE_SGLANG_KEY: what stands here is stored with the run."""
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
    restarts: int = Field(5, ge=0, le=1000)
    """How often a server that does not work is started or tried again, until it has worked for ten minutes."""
    outage_s: Seconds = 300.0
    """How long a server given by its URL may be away."""
    hang_s: Seconds = 60.0
    """A server whose scheduler does not answer for so long hangs: longer than its longest step."""
    poll_s: Annotated[float, Field(ge=0.05, le=60)] = 1.0
    """Between two looks at a server's queue and cache."""
    kv: Kv = "keep"
    """What a new version makes of running requests: "keep" or "recompute" their keys and values, or "resume" them as
    new requests with the tokens that they have."""
    means: Literal["auto", "folder", "tensor", "collective"] = "auto"
    """How weights come into a server."""
    verify: Literal["all", "sample"] = "all"
    """Which tensors are compared with what was published, after each update."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Options:
        if bool(self.urls) == bool(self.launch):
            raise ValueError("either urls or launch must be set, and only one of them")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("urls: a server stands twice")
        return self

    @property
    def servers(self) -> int:
        return len(self.urls) or self.launch

    def numbered(self, index: int) -> tuple[tuple[str, ...], dict[str, str]]:
        """Arguments and environment of one of the servers that are started."""
        number = str(index)
        args = tuple(arg.replace("{index}", number) for arg in self.server_args)
        return args, {name: value.replace("{index}", number) for name, value in self.server_env.items()}


def options_of(given: dict[str, Any]) -> Options:
    """Raises ConfigError, with the option and its value."""
    return parsed(Options, given)


def server_flags(args: Sequence[str], kv: Kv, dtype: str) -> tuple[str, ...]:
    """What a server that is started needs beside what the user names."""
    flags: list[str] = []
    if kv == "keep" and "--disable-overlap-schedule" not in args:
        # Else a step that was begun under the old weights would be booked under the new ones.
        flags.append("--disable-overlap-schedule")
    if dtype != "auto" and not any(arg.split("=")[0] == "--dtype" for arg in args):
        flags += ["--dtype", dtype]
    return tuple(flags)
