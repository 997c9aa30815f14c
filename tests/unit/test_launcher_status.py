"""What `headrace status` says beside its figures."""

from __future__ import annotations

import io

from rich.console import Console

from broker.api import Peer, QueueDepths, RunState
from deploy.status import notes, show, waiting

NOTHING_DEAD = QueueDepths(0, 0, 0, 0, 0)
RUNNING = RunState("running")


def peer(name: str, role: str, *, alive: bool = True, **state: object) -> Peer:
    return Peer(name, role, "host", 1, alive, state)  # type: ignore[arg-type]


def test_a_run_that_is_well_has_no_notes() -> None:
    assert notes(RUNNING, [peer("p", "producer"), peer("trainer", "trainer")], NOTHING_DEAD) == []


def test_what_is_missing_is_said() -> None:
    found = notes(RUNNING, [peer("p", "producer", alive=False)], NOTHING_DEAD)
    assert [note.partition(":")[0] for note in found] == ["no producer plays", "no trainer is alive"]
    assert notes(RunState("finished"), [], NOTHING_DEAD) == []


def test_dead_letters_and_who_waits_are_said() -> None:
    trainer = peer("trainer", "trainer", waits_for="room on the disk for a checkpoint", waits_since_s=42.3)
    found = notes(RUNNING, [peer("p", "producer"), trainer], QueueDepths(0, 0, 0, 0, 3))
    assert found == [
        "trainer waits for room on the disk for a checkpoint (for 42 s)",
        "3 dead: see `headrace dead list`",
    ]


def test_a_service_need_not_say_since_when_it_waits() -> None:
    assert waiting({"waits_for": "a producer"}) == "a producer"
    assert waiting({"waits_for": "", "waits_since_s": 3.0}) == ""
    assert waiting({}) == ""


def test_reasons_are_shown_as_they_are() -> None:
    console = Console(file=io.StringIO(), width=200)
    sheet = {"admitted": 1, "outstanding": 0, "closed": True, "verdicts": {"dead": 1}, "reasons": {"dead: [x] {": 1}}
    queues = {"tasks_waiting": 0, "tasks_held": 0, "groups_waiting": 0, "groups_held": 0, "dead": 1}
    state = {"run": "r", "status": "failed", "reason": "[red]no", "step": 3, "queues": queues, "processes": []}
    show(console, {**state, "balance": {"train": sheet}, "notes": ["1 dead: see [it]"]})
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert "run r: failed ([red]no), step 3" in said
    assert "    1 dead: [x] {" in said
    assert "1 dead: see [it]" in said
