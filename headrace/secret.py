"""Secrets that a process is told: by the environment, or by a file that the environment names.

The file is how containers and orchestrators give them: it stands in no list of processes and in no `inspect`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from headrace.errors import ConfigError

LONGEST = 64 << 10


def secret(name: str, environ: Mapping[str, str]) -> str:
    """What `name` says, else what the file that `<name>_FILE` names holds, without white space around it; "" for none.

    Raises ConfigError for a file that cannot be read or is empty, and where both are set.
    """
    file = environ.get(f"{name}_FILE", "")
    if not file:
        return environ.get(name, "")
    if environ.get(name):
        raise ConfigError(f"{name} and {name}_FILE are both set; leave one of them out")
    try:
        with Path(file).open(encoding="utf-8") as stream:
            value = stream.read(LONGEST + 1)
    except FileNotFoundError:
        raise ConfigError(f"{name}_FILE names {file}, which is missing; write the secret into a file there") from None
    except PermissionError:
        raise ConfigError(
            f"{name}_FILE names {file}, which user {os.getuid()} may not read; let that user read it"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}_FILE names {file}, which cannot be read: {error}") from None
    if len(value) > LONGEST:
        raise ConfigError(f"{name}_FILE names {file}, which is longer than {LONGEST} letters; write the secret into it")
    if not (value := value.strip()):
        raise ConfigError(f"{name}_FILE names {file}, which is empty; write the secret into it")
    return value


def redis_url(environ: Mapping[str, str]) -> str:
    """The URL of `HEADRACE_REDIS_URL`, with the password of `HEADRACE_REDIS_PASSWORD` where it has none itself.

    Of either there may be a file instead, as `secret` says; "" where no URL is named. Raises ConfigError.
    """
    url, password = secret("HEADRACE_REDIS_URL", environ), secret("HEADRACE_REDIS_PASSWORD", environ)
    try:
        parts = urlsplit(url)
    except ValueError as error:  # not shown: it may hold a password
        raise ConfigError(f"HEADRACE_REDIS_URL is not a URL as redis://host:6379 ({error})") from None
    if not url or not password or parts.password:
        return url
    # The user is written there as it must be in a URL.
    user, host = parts.username or "", parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}"))
