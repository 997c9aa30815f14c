"""`headrace weights`: which versions of the weights there are, and keeping one."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from broker.api import RunRecord, WeightsPort
from deploy.ages import age
from deploy.printable import printable
from headrace.errors import ConfigError, WeightError, WireError
from headrace.hosts import host_name
from headrace.version import PolicyVersion
from weightsync.arena import Arena
from weightsync.manifest import Manifest, decode

_VERSION = re.compile(r"(\d{1,18})\.(\d{1,18})")


def version_of(text: str) -> PolicyVersion:
    """Raises ConfigError for what no version is called."""
    if not (found := _VERSION.fullmatch(text)):
        raise ConfigError(f"{text!r} is no weight version (they look like 1.140); `headrace weights list` names all")
    return PolicyVersion(int(found[1]), int(found[2]))


async def listed(run_id: str, port: WeightsPort) -> list[dict[str, Any]]:
    """Every version that has a manifest or is pinned, newest first, JSON-able."""
    head, leased, pinned = await port.head(), await port.leased(), await port.pinned()
    on_it: dict[str, list[str]] = {}
    for peer in await port.peers():
        if peer.alive and peer.role == "producer":
            on_it.setdefault(str(peer.state.get("version")), []).append(peer.name)
    here = _in_memory(await port.record())
    found = []
    for version in sorted(await port.versions() | pinned, reverse=True):
        row = {
            "version": str(version),
            "head": version == head,
            "pinned": version in pinned,
            "readers": leased.get(version, []),
            "producers": sorted(on_it.get(str(version), ())),
        }
        found.append(row | _facts(await port.manifest(version), here, time.time()))
    return found


async def pin(run_id: str, port: WeightsPort, version: PolicyVersion | None) -> str:
    """Of the newest where `version` is None. Returns a sentence.

    Raises WeightError for a version that is not there or not sealed yet, Refused for one too many.
    """
    version = version or await port.head()
    if version is None:
        raise WeightError(f"run {run_id} has not published a weight version yet")
    new = version not in await port.pinned()
    await _there(run_id, port, version)
    await port.pin(version)
    try:
        # It may have been freed between the two.
        await _there(run_id, port, version)
    except WeightError:
        if new:
            await port.unpin(version)
        raise
    return f"run {run_id} keeps weight version {version} until `headrace weights unpin {version}`, or its end"


async def unpin(run_id: str, port: WeightsPort, version: PolicyVersion) -> str:
    """Returns a sentence. Raises WeightError for a version that is not pinned."""
    if not await port.unpin(version):
        raise WeightError(f"weight version {version} of run {run_id} is not pinned; see `headrace weights list`")
    return f"run {run_id} frees weight version {version} once nobody reads it"


def table(found: Sequence[Mapping[str, Any]]) -> Table:
    shown = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("version", "MB", "host", "state", "head", "pinned", "readers", "producers", "age"):
        shown.add_column(column, justify="right" if column in ("MB", "age") else "left", overflow="fold")
    for row in found:
        cells = (
            row["version"],
            "" if row["bytes"] is None else f"{row['bytes'] / 1e6:,.1f}",
            ", ".join(row["hosts"]),
            row["state"],
            "head" if row["head"] else "",
            "pinned" if row["pinned"] else "",
            ", ".join(row["readers"]),
            ", ".join(row["producers"]),
            "" if row["age_s"] is None else age(row["age_s"]),
        )
        shown.add_row(*(Text(printable(cell)) for cell in cells))
    return shown


async def _there(run_id: str, port: WeightsPort, version: PolicyVersion) -> None:
    state = _facts(await port.manifest(version), _in_memory(await port.record()), 0.0)["state"]
    if state == "gone":
        raise WeightError(f"run {run_id} has no weight version {version} (any more); see `headrace weights list`")
    if state == "coming":
        raise WeightError(f"weight version {version} of run {run_id} is still being published; pin it once it is there")


def _facts(data: bytes | None, here: set[tuple[PolicyVersion, int]], now: float) -> dict[str, Any]:
    """What a manifest says, and whether this host's memory has it. Only of its own can a host say that it is gone."""
    unknown: dict[str, Any] = {"bytes": None, "hosts": [], "here": False, "age_s": None}
    if data is None:
        return unknown | {"state": "gone"}
    try:
        manifest = decode(data)
    except WireError:
        return unknown | {"state": "unreadable"}
    missing = [part for part in range(manifest.layout.parts) if (manifest.version, part) not in here]
    return {
        "bytes": manifest.layout.nbytes,
        "hosts": sorted({part.host for part in manifest.parts}),
        "state": _state(manifest, missing),
        "here": not missing,
        "age_s": round(max(0.0, now - manifest.sealed_s), 1) if manifest.sealed else None,
    }


def _state(manifest: Manifest, missing: Sequence[int]) -> str:
    if any(manifest.parts[part].host == host_name() for part in missing):
        return "gone"
    return "sealed" if manifest.sealed else "coming"


def _in_memory(record: RunRecord) -> set[tuple[PolicyVersion, int]]:
    """Versions and parts of which this host has a segment; none where it has no memory for any."""
    try:
        return {(name.version, name.part) for name in Arena(run_folder=record.folder).segments(record.run_id)}
    except WeightError:
        return set()
