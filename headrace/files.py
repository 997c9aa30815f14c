"""Files that a reader sees whole, old or new, whatever happens to the writer."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, ServiceError


def at_home(path: str, key: str) -> Path:
    """The path with `~` and `~user` written out. Raises ConfigError, naming the key, where there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = path.partition("/")[0]
        raise ConfigError(
            f"{key} = {path!r}: {user} is no home folder of this machine; write the folder's whole path"
        ) from None


def write_json(file: Path, value: Any) -> None:
    """Replace a JSON file whole: a reader sees the old or the new one. Raises ServiceError on a full disk,
    and leaves nothing there.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ServiceError(f"{file} cannot be written: {error.strerror}") from error
