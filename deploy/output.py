"""The output of a command that goes on without readers: after `| head`, on a full disk, with its terminal gone."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable
from typing import TextIO

log = logging.getLogger(__name__)


class Output(io.TextIOBase):
    """A stream that, once it breaks, swallows what is written to it for good."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._why = ""
        """Why it broke; empty while it has not."""

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return not self._why and self._stream.isatty()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def tell_log(self) -> None:
        """Say that it is broken, where it is."""
        if self._why:
            log.warning("%s cannot be written (%s); nothing is shown there any more", self._stream.name, self._why)

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            self._why = error.strerror or str(error)
            self._silence()
            self.tell_log()

    def _silence(self) -> None:
        """Whatever the stream still holds goes nowhere, also what Python writes at exit."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        self._stream.flush()


def outlive_readers() -> list[Output]:
    """From now on this process outlives whoever reads what it prints. Returns the streams; a closed one is none."""
    outputs = []
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        if stream is not None:
            outputs.append(Output(stream))
            setattr(sys, name, outputs[-1])
    return outputs
