"""What a Redis URL may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio.connection import parse_url

from headrace.errors import ConfigError

_URL_PARTS = {"connection_class", "username", "password", "host", "port", "path", "db"}
_TLS_PATHS = {"ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"}
_TLS_PARAMETERS = _TLS_PATHS | {"ssl_cert_reqs", "ssl_check_hostname"}

_CERTIFICATE_CHECKS = {"none", "optional", "required"}


def parts_of(url: str) -> dict[str, Any]:
    """What the client reads from a URL, where a parameter wins over what the code sets (timeouts, protocol).

    Raises ConfigError for a URL that is none, or has parameters that headrace does not take.
    """
    try:
        parts = dict(parse_url(url))
        _check_form(url, parts)
    except ValueError:
        # Without its cause, which quotes the URL: a password with an unescaped "/" or "#" is read as a port.
        raise ConfigError(
            "the Redis URL must look like redis://[user:password@]host[:port][/db], rediss://… or unix://path, "
            "with a number as db and special characters of a password percent-encoded"
        ) from None
    known = _URL_PARTS | (_TLS_PARAMETERS if url.startswith("rediss:") else set())
    if unknown := sorted(parts.keys() - known):
        raise ConfigError(
            f"the Redis URL has the parameter {unknown[0]!r}, which headrace does not take; leave it out "
            f"(with rediss:// it takes {', '.join(sorted(_TLS_PARAMETERS))})"
        )
    check = parts.get("ssl_cert_reqs", "none")
    if check not in _CERTIFICATE_CHECKS:
        raise ConfigError(
            f"ssl_cert_reqs in the Redis URL is {check!r}; it takes {', '.join(sorted(_CERTIFICATE_CHECKS))}"
        )
    for name in sorted(_TLS_PATHS & parts.keys()):
        if not Path(str(parts[name])).exists():
            raise ConfigError(f"{name} in the Redis URL names {parts[name]}, which is not there")
    return parts


def _check_form(url: str, parts: dict[str, Any]) -> None:
    """Raises ValueError for what the client would read as something else: as no path, or as database 0."""
    split = urlsplit(url)
    if split.scheme == "unix":
        if not parts.get("path"):
            raise ValueError("no path of a socket")
    elif not (unquote(split.path).removeprefix("/") or "0").isdecimal():
        raise ValueError("no number of a database")
