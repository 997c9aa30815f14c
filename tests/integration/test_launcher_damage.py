"""Run folders in which somebody damaged a file: one sentence that names it, and the other runs are served."""

import json
from pathlib import Path

from tests.standins import Project, running


def test_a_damaged_folder_does_not_hide_the_other_runs(project: Project) -> None:
    project.hold()
    process = project.up("--run", "whole")
    running(project)
    for name in ("lock", "failure.json", "steps.jsonl"):
        (project.folder / "runs" / name / name).mkdir(parents=True)
        (project.folder / "runs" / name / "config.json").write_text("{}")
    done = project.headrace("runs", "list", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {row["run_id"]: row for row in json.loads(done.stdout)}
    assert {name: row["state"] for name, row in rows.items()} == {
        "whole": "running",
        "lock": "damaged",
        "failure.json": "damaged",
        "steps.jsonl": "damaged",
    }
    assert f"{Path('runs', 'failure.json', 'failure.json')} cannot be read" in rows["failure.json"]["reason"]
    # Commands that name no run find the live one, though the others are newer.
    assert project.headrace("stop").stdout == "run whole stopped\n"
    process.communicate(timeout=30)


def test_a_damaged_file_is_one_sentence_or_put_up_with(project: Project) -> None:
    """One folder, damaged in one file after the other; all are put back afterwards."""
    assert project.up("--run", "r").wait(100) == 0
    whole = {name: (project.run / name).read_bytes() for name in ("summary.json", "config.json")}
    for name, damage, sentence in (
        ("summary.json", b'{"steps": "x"}', "summary.json is damaged: steps = 'x' is no whole number; delete it"),
        ("failure.json", None, "failure.json cannot be deleted: Is a directory"),
    ):
        file = project.run / name
        file.unlink(missing_ok=True)
        if damage is None:
            file.mkdir()
        else:
            file.write_bytes(damage)
        done = project.headrace("up", "--resume", "--run", "r", "--steps", "6")
        assert done.stderr.startswith("headrace: ")
        assert sentence in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert done.returncode == 7
        if damage is None:
            file.rmdir()
        for other, content in whole.items():
            (project.run / other).write_bytes(content)

    with (project.run / "steps.jsonl").open("ab") as steps:
        steps.write(b'{"step": "many"}\n{"step": null}\n\xff\n' + b"[" * 200_000 + b'\n{"step": 4, "idle_wait": 3}\n')
    (project.run / "redis" / "redis.conf").write_bytes(b"\xff\xfe")
    done = project.headrace("up", "--resume", "--run", "r", "--steps", "6")
    assert (done.stderr, done.returncode) == ("", 0)
    assert "step 6/6" in done.stdout
