"""What one host's weight service knows about each version: when it was sealed, who reads it, who is on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from broker.api import Peer
from headrace.version import PolicyVersion

MAX_PAGES = 64
"""Versions remembered at most; the oldest freed ones go first."""

Check = Literal["pending", "verified", "damaged", "vanished", "elsewhere"]


@dataclass(frozen=True, slots=True)
class Page:
    """One version."""

    host: str
    nbytes: int
    sealed_s: float
    """Seconds since the epoch, on the publishing host's clock."""
    check: Check = "pending"
    check_s: float = 0.0
    """Seconds that verifying took."""
    here: bool = False
    """Brought from its host to this one."""
    freed: bool = False
    readers: tuple[str, ...] = ()
    """Holders of live leases."""
    on_it: tuple[str, ...] = ()
    """Producers that said in their last heartbeat that they sample from it."""


class Books:
    """Bounded; changed by one loop at a time on the event loop's thread."""

    def __init__(self) -> None:
        self._pages: dict[PolicyVersion, Page] = {}

    def open(self, version: PolicyVersion, host: str, nbytes: int, sealed_s: float) -> None:
        """Begin a page. The oldest pages beyond `MAX_PAGES` are closed."""
        self._pages.setdefault(version, Page(host, nbytes, sealed_s))
        for oldest in sorted(self._pages)[: max(0, len(self._pages) - MAX_PAGES)]:
            del self._pages[oldest]

    def checked(self, version: PolicyVersion, check: Check, seconds: float) -> None:
        self._change(version, check=check, check_s=seconds)

    def freed(self, version: PolicyVersion) -> None:
        self._change(version, freed=True)

    def imported(self, version: PolicyVersion, seconds: float) -> None:
        """It came to this host, each chunk verified."""
        self._change(version, check="verified", check_s=seconds, here=True)

    def host(self, version: PolicyVersion) -> str | None:
        """Where it was published; None where that is not known."""
        page = self._pages.get(version)
        return None if page is None else page.host

    def observe(self, leased: Mapping[PolicyVersion, Iterable[str]], peers: Iterable[Peer]) -> None:
        """Take over who reads and who is on each version now."""
        on_it: dict[str, list[str]] = {}
        for peer in peers:
            if peer.alive and peer.role == "producer":
                on_it.setdefault(str(peer.state.get("version")), []).append(peer.name)
        for version in self._pages:
            self._change(
                version,
                readers=tuple(sorted(leased.get(version, ()))),
                on_it=tuple(sorted(on_it.get(str(version), ()))),
            )

    def unfreed(self, host: str) -> list[PolicyVersion]:
        """Versions of this host that were not freed yet, oldest first."""
        return sorted(version for version, page in self._pages.items() if page.host == host and not page.freed)

    def page(self, version: PolicyVersion) -> Page | None:
        return self._pages.get(version)

    def as_json(self) -> dict[str, Any]:
        """Version to its page, newest first."""
        return {str(version): asdict(self._pages[version]) for version in sorted(self._pages, reverse=True)}

    def _change(self, version: PolicyVersion, **fields: Any) -> None:
        page = self._pages.get(version)
        if page is not None:
            self._pages[version] = replace(page, **fields)
