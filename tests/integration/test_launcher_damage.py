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
