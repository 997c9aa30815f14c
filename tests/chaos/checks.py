"""What must hold once a run under chaos is over. Each check returns sentences about what does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from audit import ledger
from audit.records import read_lines
from broker.api import Balance
from broker.connect import connect_runs
from broker.looks import QueueDepths
from broker.messages import StepRecord, Verdict
from tests.chaos.archive import Entry
from tests.chaos.processes import MARK, Exit
from tests.chaos.world import World
from tests.living import living


def sheet_wrong(sheet: Balance, history: Sequence[StepRecord], losses: int, *, exact: bool = True) -> list[str]:
    """The balance sheet of a finished run against the archived steps. Pure.

    Where Redis's newest writes and the trainer were lost together, what only they knew to be trained may count as lost.
    """
    wrong = []
    if not sheet.closed or sheet.outstanding:
        wrong.append(f"the sheet of {sheet.kind} tasks is not closed with nothing outstanding: {sheet}")
    if sheet.verdicts.get("lost", 0) and not losses:
        wrong.append(f"{sheet.verdicts['lost']} tasks are lost, though Redis lost nothing")
    archived = verdicts_of(history)
    unknown = archived["trained"] - sheet.verdicts.get("trained", 0)
    if not 0 <= unknown <= (0 if exact else sheet.verdicts.get("lost", 0)):
        wrong.append(f"the sheet has {sheet.verdicts.get('trained', 0)} trained, the archive {archived['trained']}")
    for verdict, count in archived.items():
        # A second group of a task is superseded without being the task's end, which alone is counted.
        if verdict not in ("trained", "superseded") and sheet.verdicts.get(verdict, 0) < count:
            wrong.append(f"the sheet has {sheet.verdicts.get(verdict, 0)} {verdict}, the archive {count}")
    return wrong


def depths_wrong(depths: QueueDepths) -> list[str]:
    """What lies in the streams of a finished run, besides dead letters. Pure."""
    left = {name: count for name, count in asdict(depths).items() if count and name != "dead"}
    return [f"the run is finished, but its streams hold {left}"] if left else []


def verdicts_of(history: Iterable[StepRecord]) -> Counter[Verdict]:
    return Counter(entry.verdict for record in history for entry in record.entries)


def trained_wrong(history: Sequence[StepRecord], steps: int) -> list[str]:
    """Every step of the history once, no task and no entry trained twice. Pure."""
    made = [record.version.step for record in history]
    wrong = [] if made == list(range(1, steps + 1)) else [f"the history is not the steps 1 to {steps}: {made}"]
    trained = [entry for record in history for entry in record.entries if entry.verdict == "trained"]
    for what, names in (("task", [e.task_id for e in trained]), ("entry", [e.entry_id for e in trained])):
        twice = [name for name, count in Counter(names).items() if count > 1]
        wrong += [f"{what} {name} was trained twice" for name in twice]
    return wrong


def strangers(groups: Iterable[Entry], history: Sequence[StepRecord], known: Iterable[str]) -> list[str]:
    """Groups that were trained on and are of no producer of ours. Pure."""
    trained = {entry.entry_id for record in history for entry in record.entries if entry.verdict == "trained"}
    ours = {name.encode() for name in known}
    return [
        f"entry {entry_id} of {fields.get(b'producer')!r} was trained on"
        for entry_id, fields in groups
        if entry_id in trained and fields.get(b"producer") not in ours
    ]


def exits_wrong(exits: Iterable[Exit]) -> list[str]:
    """Ends of services that no fault explains, equal ones once."""
    return [f"{count} times without a fault of ours: {said}" for said, count in Counter(map(str, exits)).items()]


def logs_wrong(folder: Path) -> list[str]:
    """A traceback in a service's log is a bug, whatever happened to the service."""
    return [f"a traceback in {log.name}" for log in sorted(folder.glob("*.log")) if b"Traceback" in log.read_bytes()]


def left_over(run_id: str) -> list[str]:
    """Processes and shared memory of this run that are still there."""
    left = living(lambda process: process.environ().get(MARK) == run_id)
    return [f"{process} is left" for process in left] + [
        f"{file} is left" for file in Path("/dev/shm").glob(f"headrace-{run_id}-*")
    ]


def ledger_wrong(folder: Path) -> list[str]:
    """Of each process that ended: its lanes against the time that it lived, as the operating system and whoever waited
    for its end saw it.
    """
    wrong = []
    lanes = ledger.read(folder).lanes
    for line in read_lines(folder / "launcher.jsonl"):
        if line["event"] != "exited":
            continue
        wall = line["at"] - line["began"]
        mine = [lane for lane in lanes if (lane.service, lane.pid) == (line["service"], line["pid"])]
        # Those of reward workers begin and end when these do.
        for lane in (lane for lane in mine if lane.role != "scoring"):
            seconds = sum(lane.seconds().values())
            if abs(seconds - wall) > 0.001 * wall:
                wrong.append(
                    f"lane {lane.name} of process {lane.pid} of {lane.service} sums to {seconds:.3f} s, it lived "
                    f"{wall:.3f} s"
                )
        if not mine and line["service"] in {lane.service for lane in lanes}:
            wrong.append(f"process {line['pid']} of {line['service']} has no lane")
    return wrong


async def keys_wrong(world: World) -> list[str]:
    """Delete the run: what stays must go by itself."""
    runs = connect_runs(world.server.url)
    await runs.delete(world.record.run_id)
    await runs.close()
    async with world.server.client() as client:
        left = [key async for key in client.scan_iter(count=512) if await client.pttl(key) == -1]
    return [f"key {key!r} has no time to live after the run was deleted" for key in left]
