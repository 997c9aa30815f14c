"""What `headrace status` says beside its figures."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from broker.api import Peer, RunState, RunStatus
from broker.looks import QueueDepths
from deploy.ages import age
from deploy.status import evaluation_lines, evaluations, memory_notes, notes, show, status_of
from deploy.troubles import Trouble, troubles

NOTHING_DEAD = QueueDepths(0, 0, 0, 0, 0)
RUNNING = RunState("running")
NOW = 1_767_225_600.0


def peer(name: str, role: str, *, alive: bool = True, **state: object) -> Peer:
    return Peer(name, role, "host", 1, alive, state)  # type: ignore[arg-type]


def test_a_run_that_is_well_has_no_notes() -> None:
    assert notes(RUNNING, [peer("p", "producer"), peer("trainer", "trainer")], NOTHING_DEAD, NOW, "") == []


def test_what_is_missing_is_said() -> None:
    found = notes(RUNNING, [peer("p", "producer", alive=False), peer("weights", "weights")], NOTHING_DEAD, NOW, "")
    assert [note.partition(":")[0] for note in found] == ["no producer plays", "no trainer is alive"]
    assert notes(RunState("finished"), [], NOTHING_DEAD, NOW, "") == []


@pytest.mark.parametrize("status", ["running", "stopping"])
def test_a_run_of_which_nothing_is_alive_is_stopped(status: RunStatus) -> None:
    gone = [peer("p", "producer", alive=False)]
    assert status_of(RunState(status), gone, "") == "stopped"
    (note,) = notes(RunState(status), gone, NOTHING_DEAD, NOW, "")
    assert note.startswith("no service is alive: what was just started loads first; `headrace up --resume` goes on")
    assert status_of(RunState(status), [peer("weights", "weights"), *gone], "") == status
    assert status_of(RunState("failed"), gone, "") == "failed"


def test_where_no_heartbeat_passes_nobody_is_missed() -> None:
    refusal = "Redis at 127.0.0.1:6379 cannot write to its disk (No space left on device)"
    gone = [peer("p", "producer", alive=False)]
    assert status_of(RUNNING, gone, refusal) == "running"
    (note,) = notes(RUNNING, gone, NOTHING_DEAD, NOW, refusal)
    assert note.startswith(f"{refusal}: no heartbeat passes")


def test_dead_letters_and_troubles_are_said() -> None:
    reason = "the checkpoint of step 4 cannot be written (No space left on device); it is tried again"
    trainer = peer("trainer", "trainer", troubles=[{"kind": "checkpoint", "reason": reason, "since": NOW - 42.3}])
    found = notes(RUNNING, [peer("p", "producer"), trainer], QueueDepths(0, 0, 0, 0, 3), NOW, "")
    assert found == [f"trainer, for 42 s: {reason}", "3 dead: see `headrace dead list`"]


def test_troubles_of_another_form_are_left_out() -> None:
    assert troubles(peer("p", "producer"), []) == troubles(peer("p", "producer", troubles="all of them"), []) == []
    mixed = peer("p", "producer", troubles=[{"reason": "x"}, "y", {"reason": "z", "since": 3}])
    assert troubles(mixed, [mixed]) == [Trouble("None", "z", 3.0)]


def test_a_missing_producer_is_said_once() -> None:
    trouble = {"kind": "producers", "reason": "all producers are gone", "since": NOW - 3.0}
    trainer = peer("trainer", "trainer", troubles=[trouble])
    found = notes(RUNNING, [trainer], NOTHING_DEAD, NOW, "")
    assert found == ["trainer, for 3 s: all producers are gone"]
    assert notes(RUNNING, [trainer, peer("p", "producer")], NOTHING_DEAD, NOW, "") == [], "it has come since"


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (59.9, "59 s"), (60, "1 min"), (7199, "1 h"), (86_400 * 3, "3 d")]
)
def test_ages_are_short(seconds: float, words: str) -> None:
    assert age(seconds) == words


def test_a_redis_that_is_nearly_full_is_said() -> None:
    assert memory_notes(50 << 20, 0) == memory_notes(89 << 20, 100 << 20) == []
    (note,) = memory_notes(90 << 20, 100 << 20)
    assert note.startswith("Redis uses 90 MiB of its maxmemory of 100 MiB: ")


def test_reasons_are_shown_as_they_are() -> None:
    console = Console(file=io.StringIO(), width=40, soft_wrap=True)
    reasons = {"dead: [x] {\x1b": 1}
    sheet = {"admitted": 1, "outstanding": 0, "closed": True, "verdicts": {"dead": 1}, "reasons": reasons}
    queues = {"tasks_waiting": 0, "tasks_held": 0, "groups_waiting": 0, "groups_held": 0, "dead": 1}
    figures = {"version": "[/1]", "tokens_per_s": 3, "idle": 0.5}
    named = {"name": "p\x1b[2J", "role": "producer", "host": "[/h]", "pid": 1, "alive": True}
    processes = [{**named, "state": figures, "lag": 0}]
    state = {
        "run": "r",
        "status": "failed",
        "reason": "[red]no",
        "step": 3,
        "queues": queues,
        "processes": processes,
        "refusal": "",
    }
    show(console, {**state, "evaluations": {}, "balance": {"train": sheet}, "notes": ["1 dead: see [it]"]})
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert "p\\x1b[2J  producer  [/h]" in said
    assert "run r: failed ([red]no), step 3" in said
    assert "    1 dead: [x] {\\x1b\n" in said
    assert "1 dead: see [it]" in said
    assert "…" not in said, "nothing is cut"


RESULT = {
    "when": "step",
    "version": "1.20",
    "step": 20,
    "accuracy": 0.5,
    "samples": 8,
    "failed": 1,
    "pass_at": {"1": 0.5, "4": 0.75},
    "environments": {"sums": {"accuracy": 1.0, "samples": 4}, "logic": {"accuracy": 0.0, "samples": 4}},
}


def test_evaluations_are_what_the_trainer_says_and_else_what_its_journal_says(tmp_path: Path) -> None:
    said = {"results": [RESULT], "going": {"version": "1.30", "missing": 3, "prompts": 10}}
    trainer = peer("trainer", "trainer", evaluations=said)
    assert evaluations([peer("p", "producer"), trainer], str(tmp_path)) == said
    line = json.dumps({"time": 1.0, "event": "result", **RESULT})
    (tmp_path / "evaluations.jsonl").write_text(f'{{"event": "begin"}}\n{line}\n{line[:9]}')
    assert evaluations([peer("trainer", "trainer", alive=False)], str(tmp_path)) == {"results": [RESULT]}
    assert evaluations([], str(tmp_path / "elsewhere")) == evaluations([], "") == {"results": []}
    assert list(evaluation_lines(said)) == [
        "evaluation of 1.20: accuracy 50.0%, pass@4 75.0% (8 samples, 1 prompt without a sample)",
        "    sums: accuracy 100.0% (4 samples)",
        "    logic: accuracy 0.0% (4 samples)",
        "evaluation of 1.30 goes on: 7 of 10 prompts answered",
    ]
