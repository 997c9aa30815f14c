"""`producer.engine_options`, as every engine over servers reads them."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, ValidationError, field_validator

from headrace.config_base import WEEK_S, Section
from headrace.errors import ConfigError
from producers.engines.remote.checksums import Verify

_URL = re.compile(r"https?://[^/?#@\s]+")

S = TypeVar("S", bound=Section)


def _server(url: str) -> str:
    """Without a slash at its end, so that a server has one name."""
    url = url.removesuffix("/")
    if not _URL.fullmatch(url):
        raise ValueError("a server is named as http://host:port, without a path, a user or a password")
    return url


Url = Annotated[str, Field(max_length=512), AfterValidator(_server)]
Seconds = Annotated[float, Field(gt=0, le=WEEK_S)]


class ServerOptions(Section):
    """What all kinds of servers have."""

    urls: tuple[Url, ...] = Field((), max_length=64)
    """Servers that are there already, as "http://host:port"."""
    devices: int = Field(1, ge=1, le=4096)
    """Of each server, as the run's device-hours count them."""
    verify: Verify = "all"
    """Which tensors are compared with what was published, after each update."""
    restarts: int = Field(5, ge=0, le=1000)
    """How often a server that does not work is started, or tried, again, until it has worked for ten minutes."""
    outage_s: Seconds = 300.0
    """How long a server given by its URL may be away."""
    hang_s: Seconds = 60.0
    """A server whose scheduler does not answer for so long hangs: longer than its longest step."""
    poll_s: Annotated[float, Field(ge=0.05, le=60)] = 1.0
    """Between two looks at a server."""

    @field_validator("urls")
    @classmethod
    def _each_once(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(urls)) < len(urls):
            raise ValueError("a server stands twice")
        return urls


def parsed(kind: type[S], given: dict[str, Any]) -> S:
    """Raises ConfigError, with the option and its value."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(["producer.engine_options", *(str(part) for part in first["loc"])])
        known = first["loc"] and first["type"] not in ("extra_forbidden", "missing")
        value = f" = {first['input']!r}" if known else ""
        raise ConfigError(f"{name}{value}: {first['msg'].removeprefix('Value error, ')}") from error
