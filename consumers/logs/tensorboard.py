"""TensorBoard: scalars in an event file of the run's folder, which `tensorboard --logdir` shows while it grows."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from headrace.config import LogsConfig
from headrace.hosts import host_name


class TensorBoard:
    """One event file. Written here and now, so that what a disk refuses is known with the line that it was."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{host_name()}.{os.getpid()}"
        self._file = (folder / name).open("ab", buffering=0)
        self._records = RecordWriter(self._file)
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=f"{kind}/{name}", simple_value=value) for name, value in figures.items()]
        self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self._file.close()

    def _add(self, event: Event) -> None:
        self._records.write(event.SerializeToString())


def open_logger(config: LogsConfig, run_id: str, folder: Path, tree: Mapping[str, Any]) -> TensorBoard:
    return TensorBoard(folder / "tensorboard")
