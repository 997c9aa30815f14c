"""The archive of a run: every group and every step record that Redis ever answered for, whatever became of them.

It is read from Redis's append-only file, so that it also has what a Redis that dies loses with the file's end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgpack

from broker.codec import decode_step
from broker.keys import Keys
from broker.messages import StepRecord
from broker.steps import replayable
from tests.chaos import aof

Entry = tuple[str, dict[bytes, bytes]]
MARKS = 256


class Archive:
    """Follows the file of one Redis. Groups go to disk; the step records, a few hundred bytes each, stay here."""

    def __init__(self, redis_folder: Path, run_id: str, store: Path) -> None:
        self._folder = redis_folder
        keys = Keys(run_id)
        self._groups, self._steps = keys.of("groups"), keys.of("steps")
        self._store = store.open("w+b")
        self._offset = 0
        self._marks = deque([(time.monotonic(), 0)], MARKS)
        """When the file was whole up to which byte."""
        self.records: list[StepRecord] = []
        """In the order of appending: also of histories that were given up."""
        self.groups = 0

    def follow(self) -> None:
        """Read what was written since the last call."""
        file = aof.file_of(self._folder)
        if not file.exists():
            return
        with file.open("rb") as stream:
            stream.seek(self._offset)
            commands, taken = aof.whole(stream.read())
        if taken:
            self._offset += taken
            self._marks.append((time.monotonic(), self._offset))
        for command in commands:
            self._keep(command)
        self._store.flush()

    def newest(self, seconds: float) -> tuple[int, int]:
        """The file's bytes of the last so many seconds: the first that may be lost, and the end."""
        self.follow()
        past = time.monotonic() - seconds
        return max((at for when, at in self._marks if when <= past), default=self._marks[0][1]), self._offset

    def cut(self, size: int) -> None:
        """Cut the file of a Redis that is down to `size` bytes; the end of what is whole is where Redis goes on.

        Half a transaction goes as a whole, as a repaired file has it: Redis 6.2 and 7.0 take away only the half
        command at its end, and what is left of the transaction counts at the start after the next one.
        """
        self.follow()
        while self._marks[-1][1] > size:
            self._marks.pop()
        start = self._marks[-1][1]
        with aof.file_of(self._folder).open("r+b") as stream:
            stream.seek(start)
            left = stream.read(size - start)
            _, taken = aof.whole(left)
            stream.truncate(start + taken if aof.BEGIN in left[taken:] else size)
        self._offset = start + taken

    @property
    def history(self) -> list[StepRecord]:
        """The steps that the weights are made of."""
        return replayable(self.records, 0)

    def entries(self) -> Iterator[Entry]:
        """All groups, in order. An id stands once, as in Redis."""
        self._store.seek(0)
        yield from msgpack.Unpacker(self._store, use_list=False)
        self._store.seek(0, 2)

    def close(self) -> None:
        self._store.close()

    def _keep(self, command: aof.Command) -> None:
        if record := aof.added(command, self._steps):
            self.records.append(decode_step(record[1][b"body"]))
        elif group := aof.added(command, self._groups):
            self.groups += 1
            self._store.write(msgpack.packb(group))
