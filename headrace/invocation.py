"""How a service process is started: what it is told by flags and environment, the same for every service."""

from __future__ import annotations

import argparse
import logging
import os
import re
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from headrace.errors import ConfigError
from headrace.secret import redis_url, secret
from headrace.service import Service, main

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_FLAGS = {
    "--redis-url": "redis://host:port without a password (default: $HEADRACE_REDIS_URL, where it may have one)",
    "--run": "the run's id (default: $HEADRACE_RUN)",
    "--name": "of this process, one of its kind in the run (default: $HEADRACE_NAME, or made up)",
    "--metrics-host": "address of /metrics and /healthz (default: $HEADRACE_METRICS_HOST, or telemetry.host); beyond "
    "loopback $HEADRACE_METRICS_TOKEN_FILE must name a file with a token",
    "--metrics-port": "of /metrics and /healthz; 0 takes a free one (default: $HEADRACE_METRICS_PORT, or 0)",
}


@dataclass(frozen=True, slots=True)
class Invocation:
    """What this process is told; the rest stands in the run's record."""

    url: str = field(repr=False)
    run_id: str
    name: str
    metrics_port: int = 0
    metrics_host: str = ""
    """Empty is that of the run's configuration."""
    metrics_token: str = field(default="", repr=False)
    resume: bool = False
    """Go on from the newest checkpoint; only the trainer takes it."""

    @classmethod
    def of(cls, role: str, flags: Mapping[str, str | bool | None], environ: Mapping[str, str]) -> Invocation:
        """Flags "redis_url", "run", "name", "metrics_host" and "metrics_port" go before `HEADRACE_REDIS_URL` and so
        on. The URL's password may stand by itself, and secrets in files, as `headrace/secret.py` says.

        Raises ConfigError with what is missing, malformed, or would show a secret to everybody who lists processes.
        """

        def told(flag: str) -> str:
            return str(flags.get(flag) or environ.get(f"HEADRACE_{flag.upper()}") or "")

        if holds_password(str(flags.get("redis_url") or "")):
            raise ConfigError(
                "--redis-url holds a password, which everybody on this machine can read; set HEADRACE_REDIS_URL instead"
            )
        flag = str(flags.get("redis_url") or "")
        # A password given by itself goes with either.
        url = redis_url({**environ, "HEADRACE_REDIS_URL": flag, "HEADRACE_REDIS_URL_FILE": ""} if flag else environ)
        if not url:
            raise ConfigError("HEADRACE_REDIS_URL is not set; it names the run's broker, as redis://host:6379")
        if not told("run"):
            raise ConfigError("no run is named; set HEADRACE_RUN or pass --run")
        name = told("name") or f"{role}-{socket.gethostname()}-{os.getpid()}"
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{role} name {name!r} must be 1 to 100 letters, digits, dots, underscores and dashes, beginning with "
                "a letter or digit"
            )
        port = told("metrics_port") or "0"
        if not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"metrics port {port!r} is not a number from 0 to 65535; 0 takes a free one")
        token = secret("HEADRACE_METRICS_TOKEN", environ)
        return cls(url, told("run"), name, int(port), told("metrics_host"), token, bool(flags.get("resume")))


def holds_password(url: str) -> bool:
    """Also where it stands as a parameter, or where the URL has an `@` but no valid form."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "@" in url
    malformed = parts.scheme not in ("redis", "rediss", "unix") and "@" in url
    return bool(parts.password) or "password" in parse_qs(parts.query) or malformed


def run(
    role: str,
    module: str,
    description: str,
    arguments: Sequence[str],
    start: Callable[[Service, Invocation], Awaitable[object]],
    *,
    drain_s: float = 30.0,
    resumes: bool = False,
) -> int:
    """Read flags and environment, then run the service to its end. Returns the exit code."""
    parser = argparse.ArgumentParser(f"python -m {module}", description=description, allow_abbrev=False)
    for flag, meaning in _FLAGS.items():
        parser.add_argument(flag, help=meaning)
    if resumes:
        parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    flags = vars(parser.parse_args(arguments))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        invocation = Invocation.of(role, flags, os.environ)
    except ConfigError as error:
        print(f"{role}: {error}", file=sys.stderr)
        return error.exit_code

    async def begin(service: Service) -> None:
        await start(service, invocation)

    return main(invocation.name, begin, drain_s=drain_s)
