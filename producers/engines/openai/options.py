"""`producer.engine_options` of engine "openai"."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from headrace.config import Section
from producers.engines.options import Seconds, Url


class Options(Section):
    """Only `urls` must be set."""

    urls: tuple[Url, ...] = Field(min_length=1, max_length=64)
    """The servers, as "http://host:port", without "/v1"."""
    model: str = ""
    """The name under which they serve it; asked from each where it serves only one."""
    api_key_env: str = Field("", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$|^$")
    """The environment variable that holds their key. Never the key: what stands here is stored with the run."""
    updates: Literal["auto", "none"] = "auto"
    """How new versions come into the servers: by the servers' own means, or not at all; then they sample from the
    weights that they serve, and cannot be trained on."""
    verify: Literal["all", "sample"] = "all"
    """Which tensors are compared with what was published, after each update."""
    seeds: bool = False
    """Whether each request's random numbers are fixed, whatever else is in the batch. vLLM samples slower so, and on a
    CPU it ends where it computes the prompt of such a request in parts."""
    restarts: int = Field(5, ge=0, le=1000)
    """How often a server that does not work is tried again, until it has worked for ten minutes."""
    outage_s: Seconds = 300.0
    """How long a server may be away."""
    hang_s: Seconds = 60.0
    """A server that does not answer for so long hangs: longer than its longest step."""
    poll_s: Annotated[float, Field(ge=0.05, le=60)] = 0.5
    """Between two looks at a server."""

    @model_validator(mode="after")
    def _each_once(self) -> Options:
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("urls: a server stands twice")
        return self
