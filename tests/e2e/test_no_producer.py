"""A run that nobody plays for, and that was told to end then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.launches import Launches

PATIENCE_S = 200.0
SETTINGS = (
    "producer.count=0",
    "trainer.without_producers='end'",
    "trainer.without_producers_s=1",
    "trainer.autocast='off'",
    "broker.stream_block_ms=300",
)


def test_it_ends_as_failed_with_a_sentence_and_can_be_resumed(launched: Launches, tiny_model: Path) -> None:
    model = shutil.copytree(tiny_model, launched.folder / "model")
    values = [word for setting in SETTINGS for word in ("--set", setting)]
    process = launched.up("--model", str(model), "--steps", "2", "--run", "alone", *values)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 7
    assert err.startswith("headrace: no producer has played for this run for ")
    assert len(err.splitlines()) == 1
    assert not any(launched.happened(part, event) for part in ("trainer", "weights") for event in ("died", "replaced"))
    (row,) = json.loads(launched.headrace("runs", "list", "--json").stdout)
    assert (row["state"], f"headrace: {row['reason']}\n") == ("failed", err)
    again = launched.up("--resume", "--run", "alone")
    _, err = again.communicate(timeout=PATIENCE_S)
    assert "no producer has played for this run" in err, "it goes on, and is as alone as before"
