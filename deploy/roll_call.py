"""Who of a launcher's parts is there: joined, stuck at its start, silent; and how that is shown."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable

from broker.api import Peer
from deploy.screen import PartView
from deploy.silence import Silence
from deploy.supervisor import Part, Report
from deploy.troubles import troubles
from headrace.config import Config

START_S = 900.0
"""A service that has not joined by then is killed and counted as dead; loading a large model takes minutes."""


class RollCall:
    """What the newest look at the broker's peers says of the parts."""

    def __init__(self, config: Config, report: Report) -> None:
        self._report = report
        self._silence = Silence(config)
        self._peers: list[Peer] = []
        self._troubles: dict[str, set[str]] = {}
        """What each part last said that it cannot go on for."""

    def call(self, parts: Iterable[Part], peers: list[Peer], elapsed_s: float) -> None:
        """Mark who has joined, and end who holds the run up. `elapsed_s` is the time between two looks.

        By looks and not by the clock: while the broker is away, nobody can be heard.
        """
        self._peers = peers
        parts = list(parts)
        self._mark_joined(parts)
        self._end_stuck(parts)
        self._tell_troubles(parts)
        for part, seconds in self._silence.too_long(parts, self._alive(), elapsed_s):
            assert part.child is not None
            self._report(part.name, "silent", f"process {part.child.pid} gave no heartbeat for {seconds:.0f} s")
            part.child.kill()

    def views(self, parts: Iterable[Part]) -> list[PartView]:
        by_pid = self._by_pid()
        return [_view(part, by_pid.get(part.child.pid) if part.child is not None else None) for part in parts]

    def _by_pid(self) -> dict[int, Peer]:
        here = socket.gethostname()
        return {peer.pid: peer for peer in self._peers if peer.alive and peer.host == here}

    def _alive(self) -> set[int]:
        return set(self._by_pid())

    def _mark_joined(self, parts: list[Part]) -> None:
        alive = self._alive()
        for part in parts:
            if part.joined or part.child is None:
                continue
            if part.role == "redis":
                # It answered: that is how the peers came here.
                part.joined = part.running
            elif part.child.pid in alive:
                part.joined = True
                self._report(part.name, "joined", "")

    def _tell_troubles(self, parts: list[Part]) -> None:
        """A trainer that cannot go on says why in its heartbeat; whoever looks at the screen should know."""
        by_pid = self._by_pid()
        for part in parts:
            peer = by_pid.get(part.child.pid) if part.child is not None else None
            if peer is None:
                continue
            said = {trouble.reason for trouble in troubles(peer, self._peers)}
            before = self._troubles.get(part.name, set())
            for reason in sorted(said - before):
                self._report(part.name, "in trouble", reason)
            if before and not said:
                self._report(part.name, "goes on", "")
            self._troubles[part.name] = said

    def _end_stuck(self, parts: list[Part]) -> None:
        """A process that never joins holds the run up as a dead one would, and is treated as one."""
        for part in parts:
            child = part.child
            if part.role == "redis" or part.joined or child is None or child.code is not None:
                continue
            if time.monotonic() - child.started > START_S:
                self._report(part.name, "stuck", f"process {child.pid} had not joined after {START_S:.0f} s")
                child.kill()


def _view(part: Part, peer: Peer | None) -> PartView:
    says = peer.state if peer is not None else {}
    return PartView(
        part.name,
        part.child.pid if part.child is not None else None,
        _word(part),
        str(says.get("version") or ""),
        says.get("tokens_per_s"),
        says.get("idle"),
        len(part.deaths),
    )


def _word(part: Part) -> str:
    if not part.running:
        return "ended" if part.child is not None and part.child.code == 0 else "restarting"
    if part.leaving:
        return "draining"
    return "running" if part.joined or part.role == "redis" else "starting"
