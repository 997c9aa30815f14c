"""What an error of Redis means: wait and try again, or a sentence that ends the call. No secret stands in either."""

from __future__ import annotations

import os
import re
import socket
import ssl

from redis import exceptions

from headrace.errors import BrokerUnavailable

_REFUSALS: tuple[tuple[type[exceptions.RedisError] | tuple[type[exceptions.RedisError], ...], str], ...] = (
    (
        (exceptions.AuthenticationError, exceptions.AuthorizationError),
        "refuses the user or the password; correct HEADRACE_REDIS_URL or HEADRACE_REDIS_PASSWORD",
    ),
    (exceptions.NoPermissionError, "does not allow the user of the URL what headrace needs"),
    (exceptions.ReadOnlyError, "is a read-only replica; name its primary in the URL"),
)

_MISCONF = re.compile(r"MISCONF (?:Errors writing to the AOF file: )?([^.]*)")
"""Redis refuses writes while its disk does; in a script's error it stands after the script's name."""


def worth_waiting(error: exceptions.RedisError, place: str) -> str:
    """The sentence of an outage that may pass: no connection, no memory, no disk, loading.

    Raises BrokerUnavailable for all else.
    """
    for kinds, sentence in _REFUSALS:
        if isinstance(error, kinds):
            raise BrokerUnavailable(f"Redis at {place} {sentence}") from None
    text = str(error)
    if text.startswith(("NOAUTH", "WRONGPASS")):
        raise BrokerUnavailable(f"Redis at {place} {_REFUSALS[0][1]}") from None
    if "user executing the script can't" in text:
        raise BrokerUnavailable(f"Redis at {place} {_REFUSALS[1][1]}") from None
    if what := _outage(error, text):
        return f"Redis at {place} {what}"
    raise BrokerUnavailable(f"Redis at {place} answered: {text}") from error


def _outage(error: exceptions.RedisError, text: str) -> str:
    if found := _MISCONF.search(text):
        return f"cannot write to its disk ({found[1]})"
    if isinstance(error, exceptions.OutOfMemoryError) or text.startswith("OOM") or "-OOM" in text or "OOM comm" in text:
        return "is full (maxmemory)"
    if isinstance(error, exceptions.BusyLoadingError):
        return "is loading its data"
    if isinstance(error, exceptions.TimeoutError):
        return "does not answer in time"
    if isinstance(error, exceptions.ConnectionError):
        return f"cannot be reached ({_cause(error)})"
    if isinstance(error, exceptions.TryAgainError) or text.startswith(("MASTERDOWN", "CLUSTERDOWN")):
        return f"is not ready ({text})"
    return ""


def _cause(error: Exception) -> str:
    """What the operating system says, without the client's own wrapping."""
    root: BaseException | None = error
    while root is not None and not isinstance(root, OSError):
        root = root.__cause__ or root.__context__
    if isinstance(root, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {root.verify_message}; ssl_ca_certs in the URL names an authority"
    if isinstance(root, ssl.SSLError):
        return f"TLS fails: {root.reason}"
    if isinstance(root, OSError) and root.errno and not isinstance(root, socket.gaierror):
        return os.strerror(root.errno)
    return (isinstance(root, OSError) and root.strerror) or "connection lost"
