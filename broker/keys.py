"""The Redis keys of a run. All carry the hash tag `{hr:<run>}`, so that a run lies in one slot of a cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.errors import Refused

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ALL_RECORDS = "{hr:*}:record"
"""Glob of the records of all runs."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of the keys of one run, by noun. Raises Refused for an id that cannot stand in a key."""

    run_id: str

    def __post_init__(self) -> None:
        if not _RUN_ID.fullmatch(self.run_id):
            raise Refused(
                f"run id {self.run_id!r}: use 1 to 64 letters, digits, '.', '_' or '-', a letter or digit first"
            )

    def of(self, noun: str) -> str:
        """The key of a noun, as in `of("tasks")`."""
        return f"{{hr:{self.run_id}}}:{noun}"

    @property
    def beats(self) -> str:
        """Prefix of the heartbeats: `<prefix><service>` lives as long as the service's lease."""
        return self.of("beat:")

    @property
    def everything(self) -> str:
        """Glob of all keys of the run."""
        return self.of("*")


def run_of(record_key: str) -> str:
    """The run id in the key of its record."""
    return record_key.removeprefix("{hr:").removesuffix("}:record")
