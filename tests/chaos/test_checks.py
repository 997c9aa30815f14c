"""Each check of the chaos driver can fail."""

from __future__ import annotations

import random
from pathlib import Path

import msgpack
import pytest
import torch

from broker.api import Balance
from broker.arrivals import Arrival
from broker.codec import decode_step, encode_step
from broker.looks import QueueDepths
from broker.messages import StepEntry, StepRecord
from broker.validate import Limits
from consumers.checkpoint import Checkpoints, RunPosition
from headrace.errors import WireError
from headrace.telemetry.journal import Journal
from headrace.version import PolicyVersion
from tests.chaos import checks
from tests.chaos.entries import VOCABULARY, bodies
from tests.chaos.faults import FAULTS, drawn, named
from tests.chaos.processes import Exit
from tests.chaos.replay import difference
from tests.support import make_group, make_task


def step(number: int, *tasks: str) -> StepRecord:
    entries = tuple(StepEntry(f"{number}-{n}", task, "trained") for n, task in enumerate(tasks))
    return StepRecord(PolicyVersion(1, number), entries)


def test_lanes_that_do_not_sum_to_the_time_that_a_process_lived_are_told(tmp_path: Path) -> None:
    def lived(**seconds: float) -> list[str]:
        for file in tmp_path.glob("*.jsonl"):
            file.unlink()
        ends = Journal(tmp_path / "launcher.jsonl")
        lane = {"lane": "engine", "kind": "device", "devices": 1, "host": "a", "begin": 100.0, "last": True}
        records = Journal(tmp_path / "p.jsonl")
        for pid, (name, wall) in enumerate(seconds.items()):
            ends.write("exited", service="p", pid=pid, began=100.0, at=100.0 + wall)
            if name != "nothing":
                records.write("spans", **lane, pid=pid, spans=[["decode", 10.0]])
        ends.close()
        records.close()
        return checks.ledger_wrong(tmp_path)

    assert lived(one=10.0, two=12.5) == [], "what comes after an orderly end is its exit"
    assert lived(one=10.0, nothing=3.0) == [], "of a process that wrote nothing all is lost"
    (wrong,) = lived(one=10.0, two=9.9)
    assert wrong == "lane engine of process 1 of p sums to 10.000 s, it lived 9.900 s"


HISTORY = [step(1, "a", "b"), step(2, "c", "d")]


def test_a_sound_run_has_nothing_wrong() -> None:
    assert checks.trained_wrong(HISTORY, 2) == []
    assert checks.sheet_wrong(Balance("train", 4, 0, {"trained": 4}), HISTORY, 0) == []
    assert checks.sheet_wrong(Balance("train", 5, 0, {"trained": 4, "lost": 1}), HISTORY, 1) == []
    assert checks.depths_wrong(QueueDepths(0, 0, 0, 0, 3)) == []


@pytest.mark.parametrize(
    "sheet",
    [
        Balance("train", 5, 0, {"trained": 4}),
        Balance("train", 5, 1, {"trained": 4}),
        Balance("train", 4, 0, {"trained": 3, "stale": 1}),
        Balance("train", 5, 0, {"trained": 4, "lost": 1}),
    ],
)
def test_a_sheet_that_does_not_fit(sheet: Balance) -> None:
    assert len(checks.sheet_wrong(sheet, HISTORY, 0)) == 1


def test_what_is_lost_with_its_trainer_may_have_been_trained() -> None:
    sheet = Balance("train", 4, 0, {"trained": 3, "lost": 1})
    assert len(checks.sheet_wrong(sheet, HISTORY, 1)) == 1
    assert checks.sheet_wrong(sheet, HISTORY, 1, exact=False) == []
    assert len(checks.sheet_wrong(Balance("train", 5, 0, {"trained": 5}), HISTORY, 1, exact=False)) == 1


def test_a_verdict_that_no_sheet_counts() -> None:
    judged = StepRecord(PolicyVersion(1, 3), (StepEntry("3-0", "e", "stale", "lag 5"),))
    assert len(checks.sheet_wrong(Balance("train", 4, 0, {"trained": 4}), [*HISTORY, judged], 0)) == 1


@pytest.mark.parametrize("history", [[step(1, "a", "a")], [step(1, "a"), step(3, "b")], [step(2, "a")]])
def test_a_history_that_is_none(history: list[StepRecord]) -> None:
    assert checks.trained_wrong(history, len(history))


def test_an_entry_of_a_stranger() -> None:
    groups = [("1-0", {b"producer": b"p"}), ("1-1", {b"producer": b"x"}), ("9-9", {b"producer": b"x"})]
    assert len(checks.strangers(groups, HISTORY, ["p"])) == 1


def test_streams_that_hold_something_and_ends_without_a_fault(tmp_path: Path) -> None:
    assert checks.depths_wrong(QueueDepths(0, 1, 0, 0, 0)) != []
    (tmp_path / "trainer.log").write_text("Traceback (most recent call last):")
    assert len(checks.logs_wrong(tmp_path)) == 1
    ends = [Exit("trainer", 3, "", ["a sentence"])] * 2
    assert len(checks.exits_wrong(ends)) == 1


def test_weights_that_differ_in_the_sign_of_a_zero(tmp_path: Path) -> None:
    for name, value in (("ran", 0.0), ("same", 0.0), ("other", -0.0)):
        position = RunPosition(PolicyVersion(1, 2), 0)
        model, optimizer = {"w": torch.tensor([value])}, {"step.w": torch.tensor(2.0)}
        checkpoints = Checkpoints(tmp_path / name, 1, 1)
        checkpoints.place(checkpoints.prepare(position, {}, model, optimizer))
    assert difference(tmp_path / "ran", tmp_path / "same", 2) == []
    assert difference(tmp_path / "ran", tmp_path / "other", 2) == ["model: w differs after the replay"]
    assert len(difference(tmp_path / "ran", tmp_path / "same", 3)) == 1


def test_a_seed_draws_the_same_faults_and_a_plan_names_known_ones() -> None:
    assert list(drawn(5, FAULTS, 20)) == list(drawn(5, FAULTS, 20))
    assert [fault.name for fault in named("redis tail", "kill trainer")] == ["redis tail", "kill trainer"]
    with pytest.raises(ValueError, match="no fault begins with"):
        named("earthquake")


def test_every_forged_body_but_a_foreign_group_and_an_unknown_version_is_refused_by_itself() -> None:
    group = make_group(make_task("a"), 1, "a stranger", vocab=VOCABULARY)
    limits = Limits(VOCABULARY, {"train": 2})
    sound = []
    for what, body in bodies(random.Random(3), group).items():
        try:
            Arrival("1-0", "a", "1", "train", "a stranger", body).group(limits)
            sound.append(what)
        except WireError:
            continue
    # A flipped bit may hit a log-prob or a reward, which nobody can tell from a right one.
    assert set(sound) - {"a changed byte"} == {"a foreign group", "an unknown version"}
    with pytest.raises(WireError):
        decode_step(msgpack.packb([0, {}]))
    assert decode_step(encode_step(HISTORY[0])) == HISTORY[0]
