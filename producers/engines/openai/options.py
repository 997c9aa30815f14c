"""`producer.engine_options` of engine "openai"."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from producers.engines.remote.options import ServerOptions, Url


class Options(ServerOptions):
    """Only `urls` must be set."""

    urls: tuple[Url, ...] = Field(min_length=1, max_length=64)
    """The servers, as "http://host:port", without "/v1"."""
    model: str = ""
    """The name under which they serve it; asked from each where it serves only one."""
    api_key_env: str = Field("", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$|^$")
    """The environment variable that holds their key, or with `_FILE` behind its name the file that does. Never the key:
    what stands here is stored with the run."""
    updates: Literal["auto", "none"] = "auto"
    """How new versions come into the servers: by the servers' own means, or not at all; then they sample from the
    weights that they serve, and cannot be trained on."""
    seeds: bool = False
    """Whether each request's random numbers are fixed, whatever else is in the batch. vLLM samples slower so, and on a
    CPU it ends where it computes the prompt of such a request in parts."""
    poll_s: Annotated[float, Field(ge=0.05, le=60)] = 0.5
    """Between two looks at a server."""
