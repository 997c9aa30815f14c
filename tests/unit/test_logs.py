"""Experiment logs: what they are given, and that none of them can stop a training."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from consumers import logs as module
from consumers.logs import MOST_WAITING, Figures, Logger, Logs, check_loggers, figures_of, loggers_of
from headrace.config import Config, LogsConfig
from headrace.errors import ConfigError
from tests.support import wait_here

STEP = {"step": 3, "version": "1.3", "loss": 0.5, "accuracy": None, "idle_wait": {"trainer": 0.25}, "skipped": ""}
RESULT = {"when": "step", "version": "1.2", "step": 2, "accuracy": 0.75, "pass_at": {"1": 0.75, "4": 1.0}}


class Kept:
    """A logger that keeps what it is told, and fails where it is to."""

    def __init__(self, fails_at: int = -1, waits: threading.Event | None = None) -> None:
        self.told: list[tuple[str, int, Figures]] = []
        self.fails_at, self.waits, self.closed = fails_at, waits, False

    def write(self, kind: str, step: int, figures: Figures) -> None:
        if self.waits is not None:
            self.waits.wait(60)
        if step == self.fails_at:
            raise OSError(28, "No space left on device")
        self.told.append((kind, step, figures))

    def close(self) -> None:
        self.closed = True


def opened(**loggers: Logger) -> Logs:
    def opening(logger: Logger) -> Callable[[], Logger]:
        return lambda: logger

    return Logs({name: opening(logger) for name, logger in loggers.items()})


def test_the_numbers_of_a_line_are_its_figures() -> None:
    line = {**STEP, "lags": [1, 2], "nan": math.nan, "drift": {"kl": {"p50": 1}}, "done": True}
    assert dict(figures_of(line)) == {"step": 3, "loss": 0.5, "idle_wait/trainer": 0.25, "drift/kl/p50": 1, "done": 1}


def test_loggers_are_told_of_steps_and_evaluations_in_order() -> None:
    kept = Kept()
    logs = opened(one=kept)
    logs.step(3, STEP)
    logs.evaluation(RESULT)
    logs.close()
    assert kept.told == [
        ("train", 3, {"step": 3, "loss": 0.5, "idle_wait/trainer": 0.25}),
        ("evaluation", 2, {"step": 2, "accuracy": 0.75, "pass_at/1": 0.75, "pass_at/4": 1.0}),
    ]
    assert kept.closed
    assert logs.trouble == ""


def test_one_that_fails_is_left_out_and_says_so_once_and_the_other_goes_on() -> None:
    failing, other = Kept(fails_at=1), Kept()
    logs = opened(failing=failing, other=other)
    for step in range(4):
        logs.step(step, {"step": step})
    wait_here(lambda: len(other.told) == 4, "the other one has all")
    assert logs.trouble == "failing logs nothing more of this run: [Errno 28] No space left on device"
    assert [step for _, step, _ in failing.told] == [0]
    logs.close()


def test_one_that_cannot_be_opened_fails_the_same_way() -> None:
    def refused() -> Logger:
        raise RuntimeError("no key\nset one")

    logs = Logs({"wandb": refused})
    logs.step(1, STEP)
    logs.close()
    assert logs.trouble == "wandb logs nothing more of this run: no key"


def test_one_that_hangs_holds_up_nobody_and_is_left_out_when_it_is_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.1)
    hangs = threading.Event()
    logs = opened(slow=Kept(waits=hangs))
    for step in range(MOST_WAITING + 2):
        logs.step(step, {"step": step})
    assert logs.trouble == f"slow logs nothing more of this run: it is {MOST_WAITING} lines behind"
    logs.close()
    hangs.set()


def test_without_loggers_there_is_no_thread() -> None:
    before = threading.active_count()
    logs = Logs()
    logs.step(1, STEP)
    logs.close()
    assert threading.active_count() == before


def test_a_package_that_is_missing_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    check_loggers(())
    with pytest.raises(
        ConfigError, match=r"'wandb' needs the extra wandb.*pip install 'headrace\[wandb\]'.*make wandb"
    ):
        check_loggers(["wandb"])


def test_only_known_loggers_may_be_named() -> None:
    assert Config().logs.to == ()
    with pytest.raises(ValueError, match="tensorboard"):
        Config.model_validate({"logs": {"to": ["mlflow"]}})


def needs(package: str) -> None:
    """Skips the test where the extra is not installed; in the checks of a pull request it must be."""
    if os.environ.get("HEADRACE_TEST_ALL_SERVERS") != "1":
        pytest.importorskip(package, reason=f"`make {package}` installs what this needs")


def written(name: str, folder: Path, run_id: str = "r1") -> None:
    """By the logger itself, as a trainer does."""
    config = LogsConfig.model_validate({"to": [name]})
    logs = Logs(loggers_of(config, run_id, folder, {"run": {"steps": 4}}))
    logs.step(3, STEP)
    logs.evaluation(RESULT)
    logs.close()
    assert logs.trouble == ""


def test_tensorboard_reads_its_own_event_files(tmp_path: Path) -> None:
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written("tensorboard", tmp_path)
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(read.Tags()["scalars"]) == {
        *("train/step", "train/loss", "train/idle_wait/trainer"),
        *("evaluation/step", "evaluation/accuracy", "evaluation/pass_at/1", "evaluation/pass_at/4"),
    }
    (loss,), (accuracy,) = read.Scalars("train/loss"), read.Scalars("evaluation/accuracy")
    assert (loss.step, loss.value, accuracy.step, accuracy.value) == (3, 0.5, 2, 0.75)


def test_a_trainer_that_goes_on_adds_an_event_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written("tensorboard", tmp_path)
    monkeypatch.setattr("os.getpid", lambda: 1)
    written("tensorboard", tmp_path)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in read.Scalars("train/loss")] == [0.5, 0.5]


def test_a_full_disk_ends_the_event_file_and_nothing_else(tmp_path: Path) -> None:
    """In a process whose files may have 4 KiB, as in one whose disk is full."""
    needs("tensorboard")
    program = """
import resource, signal, sys
from pathlib import Path
from consumers.logs import Logs, loggers_of
from headrace.config import LogsConfig
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
logs = Logs(loggers_of(LogsConfig(to=("tensorboard",)), "r", Path(sys.argv[1]), {}))
for step in range(400):
    logs.step(step, {"step": step, "loss": 0.5})
logs.close()
print(logs.trouble)
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=200)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout == "tensorboard logs nothing more of this run: [Errno 27] File too large\n"


def test_weights_and_biases_runs_offline(tmp_path: Path) -> None:
    needs("wandb")
    program = """
import sys
from pathlib import Path
from tests.unit.test_logs import written
written("wandb", Path(sys.argv[1]), "run-7")
"""
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], env=environ, capture_output=True, text=True, timeout=200
    )
    assert (done.stderr, done.returncode) == ("", 0)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-run-7.wandb")
    history = list(histories(file))
    assert {"train/step": "3", "train/loss": "0.5", "train/idle_wait/trainer": "0.25"}.items() <= history[0].items()
    assert {"evaluation/step": "2", "evaluation/pass_at/4": "1"}.items() <= history[1].items()


def histories(file: Path) -> Iterator[dict[str, str]]:
    """The rows in a file of Weights & Biases: a log of LevelDB's form, whose records are of its own protocol."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, record = file.read_bytes(), b""
    place = 7
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            read = Record.FromString(record)
            record = b""
            if read.WhichOneof("record_type") == "history":
                yield {
                    item.key or "/".join(item.nested_key): item.value_json.removesuffix(".0")
                    for item in read.history.item
                }
