"""Results are put in their place whole, and only by a trainer that still has the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from consumers import placing
from consumers.lines import MOST_WAITING, Lines
from consumers.outputs import Outputs
from headrace.errors import CheckpointError, Fenced, ServiceError
from headrace.telemetry.journal import Journal


def folder(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "file").write_text(text)
    return path


async def holds() -> None:
    """A fence that is held."""


async def fenced() -> None:
    raise Fenced("the run belongs to the trainer of incarnation 2")


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_takes_the_place_of_another_at_once(
    tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(placing, "_EXCHANGE", 1 << 20)  # flags that no kernel knows, as an older one knows none
    final = tmp_path / "model"
    placing.place(folder(placing.beside(final, 3), "new"), final)
    placing.place(folder(placing.beside(final, 3), "newer"), final)
    assert (final / "file").read_text() == "newer"
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("exchange", [True, False])
def test_of_a_link_only_the_link_is_replaced(tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchange:
        monkeypatch.setattr(placing, "_EXCHANGE", 1 << 20)
    final = tmp_path / "model"
    for target in (folder(tmp_path / "elsewhere", "of somebody"), tmp_path / "nowhere"):
        placing.remove(final)
        final.symlink_to(target)
        placing.place(folder(placing.beside(final, 3), "new"), final)
        assert (final / "file").read_text() == "new"
        assert not final.is_symlink()
        assert names(tmp_path) == ["elsewhere", "model"]
    assert (tmp_path / "elsewhere" / "file").read_text() == "of somebody"


@pytest.mark.parametrize("exchange", [True, False])
def test_what_was_swept_cannot_be_placed_and_the_place_stays_as_it_is(
    tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(placing, "_EXCHANGE", 1 << 20)
    final = folder(tmp_path / "model", "of the newer trainer")
    work = folder(placing.beside(final, 3), "of the old one")
    mine = folder(placing.beside(final, 4), "of mine")
    placing.sweep([tmp_path, tmp_path / "nowhere"], 4)
    assert names(tmp_path) == [mine.name, "model"]
    with pytest.raises(FileNotFoundError):
        placing.place(work, final)
    assert (final / "file").read_text() == "of the newer trainer"


def test_a_sweep_takes_only_what_older_trainers_prepared(tmp_path: Path) -> None:
    for name in (".a.1.writing", ".a.2.writing", ".a.writing", "a.1.writing", ".b.1.writing.swept", "steps.jsonl"):
        (tmp_path / name).write_text("")
    placing.sweep([tmp_path], 2)
    assert names(tmp_path) == [".a.2.writing", ".a.writing", "a.1.writing", "steps.jsonl"]


async def test_a_file_is_replaced_only_under_the_fence(tmp_path: Path) -> None:
    await Outputs(tmp_path, 1, holds).write_json("summary.json", {"steps": 1})
    with pytest.raises(Fenced):
        await Outputs(tmp_path, 1, fenced).write_json("summary.json", {"steps": 2})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 1}
    assert names(tmp_path) == ["summary.json"]


async def test_one_that_lost_the_run_after_it_asked_finds_nothing_to_place(tmp_path: Path) -> None:
    async def then_swept() -> None:
        placing.sweep([tmp_path], 2)

    async def prepare(work: Path) -> None:
        folder(work, "old")

    outputs = Outputs(tmp_path, 1, then_swept)
    with pytest.raises(CheckpointError, match=r"summary.json cannot be written: No such file"):
        await outputs.write_json("summary.json", {})
    with pytest.raises(CheckpointError, match="model cannot be written: No such file"):
        await outputs.write_folder("model", prepare)
    assert names(tmp_path) == []


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(text) for text in file.read_text().splitlines()]


def test_a_newer_trainer_takes_the_journal_over(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    old = Lines(file, 1)
    old.write("step", step=1)
    new = Lines(file, 2)
    assert new.last["step"] == 1
    old.write("step", step=2)
    new.write("step", step=3)
    old.close()
    new.close()
    assert [line["step"] for line in lines(file)] == [1, 3]
    assert names(tmp_path) == ["steps.jsonl"]


def test_lines_wait_for_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "steps.jsonl"
    made = Lines(file, 1)
    made.write("step", step=0)
    written, room = Journal.write, 0

    def write(self: Journal, event: str, **fields: object) -> None:
        nonlocal room
        if not room:
            raise ServiceError(f"journal {file} cannot be written: no room")
        room -= 1
        written(self, event, **fields)

    monkeypatch.setattr(Journal, "write", write)
    for step in range(1, MOST_WAITING + 4):
        made.write("step", step=step)
    assert made.trouble.endswith("cannot be written: no room; its lines wait in memory")
    room = 1
    made.flush()
    assert made.trouble
    assert lines(file)[-1]["step"] == 4, "whatever was left out before it, the last line is one of a step"
    room = MOST_WAITING
    made.flush()
    assert made.trouble == ""
    made.close()
    got = lines(file)
    assert [line["step"] for line in got] == [0, *range(4, MOST_WAITING + 4)]
    assert [line["lines_left_out"] for line in got if "lines_left_out" in line] == [got[1]["lines_left_out"]] == [3]
