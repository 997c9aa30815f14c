"""Experiment logs: the figures of steps and evaluations for TensorBoard and Weights & Biases, beside the JSON lines.

Wait graph: one thread waits for figures (`Logs.step`, `Logs.evaluation`, which wait for nothing) and writes them; it
may wait for a disk or a network as long as it likes. At the end it is waited for, `CLOSE_S` at most. A logger that
fails is left out from then on: the JSON lines have everything.
"""

from __future__ import annotations

import importlib.util
import math
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from headrace.config import LogsConfig
from headrace.errors import ConfigError

MOST_WAITING = 1000
"""Sets of figures that wait for a slow logger; further ones are left out."""
CLOSE_S = 15.0

Figures = dict[str, float]


class Logger(Protocol):
    def write(self, kind: str, step: int, figures: Figures) -> None:
        """`kind` is "train" or "evaluation", `step` that of the version. Raises whatever went wrong."""
        ...

    def close(self) -> None: ...


LOGGERS = {"tensorboard": "consumers.logs.tensorboard", "wandb": "consumers.logs.wandb"}
"""Name, which is also that of the package and of the extra, to the module with its `open_logger`."""


def check_loggers(names: Iterable[str]) -> None:
    """Raises ConfigError for a logger whose package is not installed here."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"logs.to: {name!r} needs the extra {name}, which is not installed here; "
                f"`pip install 'headrace[{name}]'` installs it, in a checkout `make {name}`"
            )


def loggers_of(
    config: LogsConfig, run_id: str, folder: Path, tree: Mapping[str, Any]
) -> dict[str, Callable[[], Logger]]:
    """What opens each, by name: that takes a while, and is for the thread. `tree` is the run's configuration."""

    def opening(name: str) -> Callable[[], Logger]:
        def open_one() -> Logger:
            logger: Logger = import_module(LOGGERS[name]).open_logger(config, run_id, folder, tree)
            return logger

        return open_one

    return {name: opening(name) for name in config.to}


class Logs:
    """All loggers of one trainer."""

    def __init__(self, opening: Mapping[str, Callable[[], Logger]] | None = None) -> None:
        self._opening = dict(opening or {})
        self._faults: dict[str, str] = {}
        self._waiting: queue.Queue[tuple[str, int, Figures] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="experiment-logs", daemon=True)
        if self._opening:
            self._thread.start()

    @property
    def trouble(self) -> str:
        """Which loggers have failed, and why; empty while none has."""
        faults = sorted(self._faults.items())
        return "; ".join(f"{name} logs nothing more of this run: {why}" for name, why in faults)

    def step(self, step: int, fields: Mapping[str, Any]) -> None:
        """The line of a step."""
        self._put("train", step, fields)

    def evaluation(self, fields: Mapping[str, Any]) -> None:
        """A result, as `consumers.evaluation.Done.shown` tells it."""
        self._put("evaluation", int(fields["step"]), fields)

    def close(self) -> None:
        if not self._opening:
            return
        try:
            self._waiting.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _put(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        if len(self._faults) == len(self._opening):
            return
        try:
            self._waiting.put_nowait((kind, step, dict(figures_of(fields))))
        except queue.Full:
            for name in self._opening:
                self._faults.setdefault(name, f"it is {MOST_WAITING} lines behind")

    def _run(self) -> None:
        loggers: dict[str, Logger] = {}
        for name, opening in self._opening.items():
            self._try(name, lambda name=name, opening=opening: loggers.update({name: opening()}))  # type: ignore[misc]
        while (told := self._waiting.get()) is not None:
            for name, logger in loggers.items():
                if name not in self._faults:
                    self._try(name, lambda logger=logger, told=told: logger.write(*told))  # type: ignore[misc]
        for name, logger in loggers.items():
            self._try(name, logger.close)

    def _try(self, name: str, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever a logger's package raises must not end the training
            text = str(error).strip() or type(error).__name__
            self._faults.setdefault(name, text.splitlines()[0])


def figures_of(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of a line, those of its tables by "table/name"; texts, lists and nothing are left out."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from figures_of(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            yield f"{prefix}{name}", float(value)
