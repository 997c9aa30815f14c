"""Which segment of this host holds a part of a version, whoever filled it."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from headrace.errors import WeightError
from headrace.version import PolicyVersion
from weightsync.arena import Arena, Segment, SegmentName
from weightsync.manifest import Layout

LOOK_S = 0.002
"""Between two looks whether a segment has grown: whoever fills it may be another process, which wakes nobody."""


class Held:
    """A part that lies here, perhaps not all of it yet. To be closed. For one thread."""

    def __init__(self, segment: Segment, filled: Callable[[], bool]) -> None:
        """`filled` says whether its owner lives, and may fill more of it."""
        self.segment = segment
        self._filled = filled
        self._mapping: mmap.mmap | None = None

    @contextmanager
    def view(self, start: int, end: int) -> Iterator[memoryview]:
        """These bytes, mapped; afterwards their pages are no longer part of this process. `start` begins a chunk.

        Raises WeightError for a file that somebody has cut.
        """
        if self._mapping is None:
            try:
                self._mapping = mmap.mmap(self.segment.fileno(), self.segment.nbytes, prot=mmap.PROT_READ)
            except ValueError as error:
                raise WeightError(f"weight segment {self.segment.name} cannot be mapped: {error}") from error
        with memoryview(self._mapping) as whole, whole[start:end] as view:
            yield view
        page = start - start % mmap.PAGESIZE
        self._mapping.madvise(mmap.MADV_DONTNEED, page, end - page)

    def grown(self, chunk: int, seconds: float, ended: Callable[[float], bool]) -> int:
        """How many chunks are ready: as soon as `chunk` is among them, else after so many seconds.

        `ended` waits, and says whether nobody wants to know any more. Raises WeightError for a file that was cut.
        """
        until = time.monotonic() + seconds
        while (ready := self.segment.ready()) <= chunk and time.monotonic() < until and not ended(LOOK_S):
            pass
        return ready

    @property
    def abandoned(self) -> bool:
        """Whether no more of it will come."""
        return not self._filled() and not self.segment.complete

    def close(self) -> None:
        # Unmapped with the last view of it: an exception that is on its way may hold one.
        self._mapping = None
        self.segment.close()


class HeldBase:
    """A part of an older version that is whole here, as a `Base`. To be closed."""

    def __init__(self, version: PolicyVersion, held: Held, chunk_bytes: int) -> None:
        self.version = version
        self._held = held
        self._chunk_bytes = chunk_bytes

    def read(self, part: int, chunk: int, views: list[memoryview]) -> None:
        self._held.segment.read(chunk * self._chunk_bytes, views)

    def close(self) -> None:
        self._held.close()


class Shelf:
    """The segments of one run."""

    def __init__(self, arena: Arena, run_id: str) -> None:
        self._arena = arena
        self._run_id = run_id

    def find(self, version: PolicyVersion, part: int, nbytes: int, chunk_bytes: int) -> Held | None:
        """The segment of this part that is furthest; None when there is none of this size."""
        best: Held | None = None
        furthest = -1
        # The tensors of it are of no matter here.
        layout = Layout((), nbytes, chunk_bytes=chunk_bytes)
        with contextlib.suppress(WeightError):
            # Where the whole folder is gone, it is not here.
            for name in self._arena.segments(self._run_id):
                if (name.version, name.part) != (version, part) or (segment := self._open(name, layout)) is None:
                    continue
                if (ready := _ready(segment)) <= furthest:
                    segment.close()
                    continue
                if best is not None:
                    best.close()
                best, furthest = Held(segment, partial(self._arena.lives, name)), ready
        return best

    def whole(self, version: PolicyVersion, part: int, nbytes: int, chunk_bytes: int) -> Held | None:
        """As `find`, where it is complete."""
        held = self.find(version, part, nbytes, chunk_bytes)
        if held is None or _complete(held.segment):
            return held
        held.close()
        return None

    def _open(self, name: SegmentName, layout: Layout) -> Segment | None:
        """None when it is gone, or not of this size."""
        try:
            return self._arena.open(str(name), layout)
        except WeightError:
            return None


def _ready(segment: Segment) -> int:
    """-1 for a file that somebody has cut since it was opened."""
    try:
        return segment.ready()
    except WeightError:
        return -1


def _complete(segment: Segment) -> bool:
    try:
        return segment.complete
    except WeightError:
        return False
