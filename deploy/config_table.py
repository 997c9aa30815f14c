"""`headrace config`: every value, and where it came from."""

from __future__ import annotations

import json

from rich.table import Table
from rich.text import Text

from headrace.config_sources import Resolved, flatten


def table(resolved: Resolved) -> Table:
    """One row per key. A list (as `environments`) is one value."""
    found = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("key", "value", "from"):
        found.add_column(column, overflow="fold")
    for key, value in flatten(resolved.config.model_dump(mode="json")):
        origin = origin_of(key, resolved.origins)
        found.add_row(key, Text(json.dumps(value)), Text(origin, style="dim" if origin == "default" else ""))
    return found


def origin_of(key: str, origins: dict[str, str]) -> str:
    """A key given whole, as part of a given table, or as the parent of given keys; else "default"."""
    for known, origin in origins.items():
        if key == known or key.startswith(f"{known}.") or known.startswith(f"{key}."):
            return origin
    return "default"
