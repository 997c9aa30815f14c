"""The ledger: where the time of every lane of a run went, from the records in its folder. Pure but for reading files.

A lane of one process is contiguous from its beginning to its end. What its process did not get to write before it was
killed is phase `lost`: up to its death where the launcher saw it, else up to the next process of that service, and then
at most `UNSEEN_S`. Docs: docs/audit.md, "Records".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from audit.records import EXIT, LOST, Lane, Line, Piece, read_lines
from audit.sharing import device_seconds

UNSEEN_S = 1.0
"""What a death that nobody saw can have lost: services write once a second."""
JOIN_S = 2e-6
"""Times in records are rounded to the microsecond: this far apart, two are the same."""
TRAINER_WAITS = frozenset({"start", "wait_groups", "wait_evaluation"})
"""While the trainer is in another phase, a producer without a task waits for it, not for what other producers hold."""
NO_TASK, BACKPRESSURE = "wait_no_task", "wait_backpressure"
LAUNCHER = "launcher"


@dataclass(frozen=True, slots=True)
class Ledger:
    """All lanes of a run; of each, the seconds of its phases sum to its wall time."""

    lanes: tuple[Lane, ...]
    estimated: frozenset[tuple[str, str]] = frozenset()
    """Services and lanes whose split into phases is estimated."""
    threads: Mapping[tuple[str, str, int], int] = field(default_factory=dict)
    """The operating system's id of a lane's own thread, by service, lane and process."""

    def device_seconds(self, begin: float = float("-inf"), end: float = float("inf")) -> dict[str, dict[str, float]]:
        """Role to phase to device-seconds: seconds times devices, or shares of one device. Host lanes hold none."""
        found: dict[str, dict[str, float]] = {}
        for lane, spent in device_seconds(self.lanes, begin, end):
            phases = found.setdefault(lane.role, {})
            for phase, seconds in spent.items():
                phases[phase] = phases.get(phase, 0.0) + seconds
        return found

    def seconds(self, service: str, lane: str) -> dict[str, float]:
        """Phase to seconds of one lane of one service, over all its processes."""
        found: dict[str, float] = {}
        for one in self.lanes:
            if (one.service, one.name) == (service, lane):
                for phase, spent in one.seconds().items():
                    found[phase] = found.get(phase, 0.0) + spent
        return found


@dataclass(slots=True, eq=False)
class _Account:
    """A lane of one process while it is read."""

    service: str
    newest: Line
    pieces: list[Piece]
    ended: bool = False
    written: float = 0.0
    """Where its last record ended."""

    @property
    def begin(self) -> float:
        return self.pieces[0].begin

    @property
    def end(self) -> float:
        return self.pieces[-1].end

    def still(self, until: float) -> None:
        """It was in its last phase until then, which its next record says again."""
        if self.pieces:
            last = self.pieces[-1]
            self.pieces[-1] = Piece(last.begin, max(last.end, until), last.phase)

    def take(self, line: Line, offset: float) -> None:
        self.newest, self.ended = line, self.ended or bool(line.get("last"))
        begin = float(line["begin"]) + offset
        if line.get("cumulative"):
            self.pieces = []
        elif self.pieces:
            last = self.pieces[-1]
            self.pieces[-1] = Piece(last.begin, self.written, last.phase)
            if begin - self.written > JOIN_S:
                # Of a line that nobody can read.
                self.pieces.append(Piece(self.written, begin, LOST))
            else:
                begin = self.written
        # Small numbers are summed first: of large ones a sum of many is off by more than a microsecond.
        spent, self.written = 0.0, begin
        for phase, seconds in line.get("spans") or list((line.get("sums") or {}).items()):
            spent += float(seconds)
            at, self.written = self.written, begin + spent
            if self.pieces and self.pieces[-1].phase == phase:
                self.pieces[-1] = Piece(self.pieces[-1].begin, self.written, phase)
            elif seconds:
                self.pieces.append(Piece(at, self.written, phase))


def read(folder: Path, offsets: Mapping[str, float] | None = None) -> Ledger:
    """Of the run in a folder. `offsets`: seconds to add to the times of each service. Raises ServiceError."""
    return of({file.stem: read_lines(file) for file in sorted(folder.glob("*.jsonl"))}, offsets or {})


def of(journals: Mapping[str, Iterable[Line]], offsets: Mapping[str, float]) -> Ledger:
    """The same from lines by the name of their journal."""
    accounts: dict[tuple[str, str, str, int], _Account] = {}
    lives: dict[tuple[str, int], tuple[float, float]] = {}
    for journal, lines in journals.items():
        offset = offsets.get(journal, 0.0)
        for line in lines:
            if line.get("event") == "spans":
                service = str(line.get("service") or journal)
                key = (service, str(line["lane"]), str(line["host"]), int(line["pid"]))
                account = accounts.setdefault(key, _Account(service, line, []))
                account.take(line, offset if service == journal else offsets.get(service, 0.0))
            elif line.get("event") == "still":
                for lane in line["lanes"]:
                    if known := accounts.get((journal, str(lane), str(line["host"]), int(line["pid"]))):
                        known.still(float(line["until"]) + offset)
            elif journal == LAUNCHER and line.get("event") == "exited":
                process = str(line["service"]), int(line["pid"])
                lives[process] = float(line["began"]) + offset, float(line["at"]) + offset
    filled = [account for account in accounts.values() if account.pieces]
    _add_lost(filled, {process: end for process, (_, end) in lives.items()})
    filled += _unrecorded(filled, lives)
    return Ledger(
        lanes=tuple(_refined(filled)),
        estimated=frozenset((a.service, str(a.newest["lane"])) for a in filled if a.newest.get("estimated")),
        threads={
            (a.service, str(a.newest["lane"]), int(a.newest["pid"])): int(a.newest["thread"])
            for a in filled
            if a.newest.get("thread")
        },
    )


def role_of(lane: str) -> str:
    """The role of a lane, by its name."""
    if lane.startswith("score/"):
        return "scoring"
    if lane.startswith("external/"):
        return "external"
    return {"engine": "producer", "host": "producer", "trainer": "trainer", "rank": "trainer"}.get(lane, "weights")


def _add_lost(accounts: list[_Account], deaths: Mapping[tuple[str, int], float]) -> None:
    """What lies between a lane's last record and the end of its process."""
    processes: dict[str, list[tuple[float, int]]] = {}
    for account in accounts:
        processes.setdefault(account.service, []).append((account.begin, int(account.newest["pid"])))
    for account in accounts:
        pid, end = int(account.newest["pid"]), account.end
        death = deaths.get((account.service, pid))
        if death is None and account.ended:
            continue
        if death is None:
            later = [begin for begin, other in processes[account.service] if other != pid and begin > account.begin]
            death = min(end + UNSEEN_S, max(end, min(later))) if later else end
        if death - end > JOIN_S:
            account.pieces.append(Piece(end, death, EXIT if account.ended else LOST))


def _unrecorded(accounts: list[_Account], lives: Mapping[tuple[str, int], tuple[float, float]]) -> list[_Account]:
    """Device lanes of processes that were killed before they wrote anything: those that others of the service had."""
    recorded = {(account.service, int(account.newest["pid"])) for account in accounts}
    found = []
    for (service, pid), (begin, end) in lives.items():
        if (service, pid) in recorded or end <= begin:
            continue
        lanes = {a.newest["lane"]: a.newest for a in accounts if a.service == service and a.newest["kind"] == "device"}
        for newest in lanes.values():
            found.append(_Account(service, {**newest, "pid": pid}, [Piece(begin, end, LOST)]))
    return found


def _refined(accounts: list[_Account]) -> list[Lane]:
    """As lanes. A producer without a task waits for the trainer while that is at work with what it has."""
    trainer = sorted(
        (piece.begin, piece.end)
        for account in accounts
        if account.newest["lane"] == "trainer"
        for piece in account.pieces
        if piece.phase not in TRAINER_WAITS and piece.phase != LOST
    )
    busy = _joined(trainer)
    return [_lane(account, busy) for account in accounts]


def _lane(account: _Account, trainer_works: list[tuple[float, float]]) -> Lane:
    newest: dict[str, Any] = account.newest
    name = str(newest["lane"])
    pieces = account.pieces
    if role_of(name) == "producer":
        pieces = _by_reason(pieces, trainer_works)
    return Lane(
        service=account.service,
        role=role_of(name),
        name=name,
        kind=str(newest.get("kind", "host")),
        host=str(newest["host"]),
        pid=int(newest["pid"]),
        pieces=tuple(pieces),
        devices=int(newest.get("devices", 0)),
        device=str(newest.get("device", "")),
        shared=bool(newest.get("shared")),
    )


def _by_reason(pieces: list[Piece], trainer_works: list[tuple[float, float]]) -> list[Piece]:
    """`wait_no_task` in pieces: what of it the trainer was at work is backpressure. In one pass."""
    found: list[Piece] = []
    at = 0
    for piece in pieces:
        if piece.phase != NO_TASK:
            found.append(piece)
            continue
        begin = piece.begin
        while at < len(trainer_works) and trainer_works[at][1] <= begin:
            at += 1
        place = at
        while place < len(trainer_works) and trainer_works[place][0] < piece.end:
            first, last = max(begin, trainer_works[place][0]), min(piece.end, trainer_works[place][1])
            if first > begin:
                found.append(Piece(begin, first, NO_TASK))
            found.append(Piece(first, last, BACKPRESSURE))
            begin, place = last, place + 1
        if piece.end > begin:
            found.append(Piece(begin, piece.end, NO_TASK))
    return found


def _joined(stretches: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sorted stretches of time, those that touch as one."""
    found: list[tuple[float, float]] = []
    for begin, end in stretches:
        if found and begin - found[-1][1] <= JOIN_S:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found
