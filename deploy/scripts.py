"""`headrace scripts`: the Lua scripts of the wire, as files that a producer in another language loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from broker.keys import Keys
from broker.messages import SCHEMA
from broker.redis.scripts import Script, scripts
from headrace.errors import ServiceError

INDEX = "scripts.json"


def write_scripts(folder: Path) -> str:
    """Write each script as EVALSHA knows it, and an index; returns a sentence. Raises ServiceError."""
    found = scripts()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for script in found.values():
            (folder / f"{script.name}.lua").write_bytes(script.text.encode())
        (folder / INDEX).write_text(json.dumps(index(found), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ServiceError(f"scripts cannot be written into {folder}: {error.strerror}") from error
    return f"wrote {len(found)} scripts of wire schema {SCHEMA} and {INDEX} into {folder}"


def index(found: dict[str, Script]) -> dict[str, Any]:
    """What is in the folder: the schema, how keys are named, and each script's digest and keys in order."""
    return {
        "schema": SCHEMA,
        "key": Keys("RUN").of("NOUN"),
        "scripts": {
            name: {"file": f"{name}.lua", "sha1": script.sha, "keys": list(script.keys), "fenced": script.fenced}
            for name, script in sorted(found.items())
        },
    }
