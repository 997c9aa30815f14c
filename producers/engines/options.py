"""`producer.engine_options`, as every engine over servers reads them."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from headrace.config import WEEK_S, Section
from headrace.errors import ConfigError

Url = Annotated[str, Field(pattern=r"^https?://[^/?#]+/?$", max_length=512)]
Seconds = Annotated[float, Field(gt=0, le=WEEK_S)]

S = TypeVar("S", bound=Section)


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
