"""Same-host segments: one immutable file of shared memory per weight version.

A writer creates a file, fills it through a mapping and lets the mapping go; from then on it is only read.
Unlinking frees it: what readers have opened stays readable until they let go. Behind the data a segment says how far
it is: how many chunks are ready, in order, and the digest of each, so that a reader need not wait for the last one.

    data, padded to a page | magic, bytes of data, chunks ready, 1 when complete (4 x u64) | 16 bytes per chunk

The name says whose it is, so that the leftovers of a dead owner are told from the segments of a living one without
asking it, as `weightsync/owners.py` says (`start` is the process's start time in clock ticks since boot, as a pid may
be used again):

    headrace-<run id>-<home>-<version>-<part>-<pid>-<start>-<pid namespace>-<nonce>

`home` is a digest of the run's folder: it tells two runs apart that have one id, each on a Redis of its own.

A spare, whose name ends in `-spare`, is memory that its owner will fill next: it belongs to no version yet.
multiprocessing.shared_memory is not used: its resource tracker unlinks segments that other processes still own.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import re
import secrets
import stat
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.errors import WeightError
from headrace.version import PolicyVersion
from weightsync.manifest import DIGEST_BYTES, Layout
from weightsync.owners import Owner, announce

FOLDER_VARIABLE = "HEADRACE_SHM_DIR"
"""Where segments lie; unset it is /dev/shm."""
MAX_RUN_ID = 128
ORPHAN_AGE_S = 600.0
"""A segment of another run is removed when its owner is dead and it is at least this old."""

_MADV_POPULATE_WRITE = 23
_POPULATE_BYTES = 4 << 20

_MAX_VIEWS = 1024
"""What one preadv takes (IOV_MAX of Linux)."""
_PAGE = 4096
_PROGRESS = struct.Struct("<4Q")
_MAGIC = 0x31474553_45434152
_NAME = re.compile(
    r"headrace-(?P<run>[A-Za-z0-9][A-Za-z0-9._-]{0,127})"
    r"-(?P<home>[0-9a-f]{8})-(?P<incarnation>\d{1,18})\.(?P<step>\d{1,18})-(?P<part>\d{1,4})-(?P<pid>\d{1,10})-(?P<start>\d{1,20})-(?P<namespace>\d{1,20})-(?P<nonce>[0-9a-f]{8})(?P<spare>-spare)?"
)


@dataclass(frozen=True, slots=True)
class SegmentName:
    run_id: str
    version: PolicyVersion
    owner: Owner
    nonce: str
    part: int = 0
    spare: bool = False
    home: str = "0" * 8

    def __str__(self) -> str:
        owner = self.owner
        whose = f"{owner.pid}-{owner.start}-{owner.namespace}-{self.nonce}"
        return f"headrace-{self.run_id}-{self.home}-{self.version}-{self.part}-{whose}{'-spare' if self.spare else ''}"

    @classmethod
    def parse(cls, text: str) -> SegmentName | None:
        """The inverse of `str`; None for anything else."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        version = PolicyVersion(int(match["incarnation"]), int(match["step"]))
        owner = Owner(int(match["pid"]), int(match["start"]), int(match["namespace"]))
        part, spare = int(match["part"]), bool(match["spare"])
        return cls(match["run"], version, owner, match["nonce"], part, spare, match["home"])


class NewSegment:
    """A segment that its owner fills. Views on `data` must be gone before `seal`."""

    def __init__(self, path: Path, mapping: mmap.mmap, nbytes: int) -> None:
        self.nbytes = nbytes
        self._path = path
        self._mapping = mapping
        self._chunks = 0

    @property
    def name(self) -> str:
        return self._path.name

    @property
    def data(self) -> memoryview:
        """The whole of it, writable."""
        return memoryview(self._mapping)[: self.nbytes]

    def begin(self, name: SegmentName) -> None:
        """A spare becomes the segment of this name."""
        path = self._path.with_name(str(name))
        self._path.rename(path)
        self._path = path

    def grow(self, digests: Sequence[bytes]) -> None:
        """The next chunks are ready to be read. By one thread at a time."""
        at = _progress_at(self.nbytes)
        place = at + _PROGRESS.size + DIGEST_BYTES * self._chunks
        self._mapping[place : place + DIGEST_BYTES * len(digests)] = b"".join(digests)
        self._chunks += len(digests)
        _PROGRESS.pack_into(self._mapping, at, _MAGIC, self.nbytes, self._chunks, 0)

    def seal(self) -> None:
        """It is complete: let the writable mapping go; the file stays."""
        _PROGRESS.pack_into(self._mapping, _progress_at(self.nbytes), _MAGIC, self.nbytes, self._chunks, 1)
        self._mapping.close()

    def discard(self) -> None:
        """Remove the file. The memory goes back once no view on `data` is left."""
        self._path.unlink(missing_ok=True)


class Segment:
    """A segment that is read, perhaps while its owner fills it. Stays readable after it was freed. For any thread."""

    def __init__(self, name: str, file: int, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self._file = file

    def ready(self) -> int:
        """How many chunks may be read. Raises WeightError for a file that somebody has cut."""
        return self._progress()[0]

    @property
    def complete(self) -> bool:
        """Raises WeightError as `ready` does."""
        return self._progress()[1]

    def digests(self, first: int, end: int) -> list[bytes]:
        """Of these chunks, as its owner computed them. Raises WeightError as `ready` does."""
        place = _progress_at(self.nbytes) + _PROGRESS.size + DIGEST_BYTES * first
        raw = self._behind_the_data(DIGEST_BYTES * (end - first), place)
        return [raw[at : at + DIGEST_BYTES] for at in range(0, len(raw), DIGEST_BYTES)]

    def read(self, start: int, views: Sequence[memoryview]) -> None:
        """Copy the bytes from `start` on into the views, in order. Raises WeightError where there are not as many."""
        for first in range(0, len(views), _MAX_VIEWS):
            some = views[first : first + _MAX_VIEWS]
            wanted = sum(map(len, some))
            got = os.preadv(self._file, some, start)
            if got != wanted:
                raise WeightError(f"weight segment {self.name} gave {got} bytes of {wanted}")
            start += got

    def map(self) -> npt.NDArray[np.uint8]:
        """Its bytes [nbytes] in place, for as long as the array lives; what is written there nobody else sees."""
        mapping = mmap.mmap(self._file, self.nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        return np.frombuffer(mapping, np.uint8)

    @property
    def freed(self) -> bool:
        """Whether nobody can open it any more."""
        return os.fstat(self._file).st_nlink == 0

    def fileno(self) -> int:
        return self._file

    def close(self) -> None:
        """Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _progress(self) -> tuple[int, bool]:
        raw = self._behind_the_data(_PROGRESS.size, _progress_at(self.nbytes))
        magic, nbytes, chunks, complete = _PROGRESS.unpack(raw)
        # Nothing is written there before the first chunk is ready.
        return (chunks, bool(complete)) if (magic, nbytes) == (_MAGIC, self.nbytes) else (0, False)

    def _behind_the_data(self, nbytes: int, place: int) -> bytes:
        raw = os.pread(self._file, nbytes, place)
        if len(raw) != nbytes:
            raise WeightError(f"weight segment {self.name} was cut to {os.fstat(self._file).st_size} bytes")
        return raw


class Arena:
    """The segments of one host, in one folder."""

    def __init__(self, folder: Path | None = None, *, run_folder: str | Path = "") -> None:
        """`run_folder`: of the run that it is asked about, as its record names it.

        Raises WeightError when there is no folder for segments.
        """
        self.folder = folder if folder is not None else default_folder(os.environ)
        self._home = hashlib.blake2b(str(run_folder).encode(), digest_size=4).hexdigest()

    def name(self, run_id: str, version: PolicyVersion, part: int = 0, *, spare: bool = False) -> SegmentName:
        """Of a segment that this process will make. Raises WeightError for a run id that cannot stand in one."""
        name = SegmentName(run_id, version, Owner.this(), secrets.token_hex(4), part, spare, self._home)
        if SegmentName.parse(str(name)) is None:
            raise WeightError(
                f"run id {run_id!r} cannot name a shared-memory segment; use letters, digits, dots and dashes"
            )
        return name

    def create(
        self, run_id: str, version: PolicyVersion, layout: Layout, part: int = 0, *, spare: bool = False
    ) -> NewSegment:
        """A new segment for one part, all of it reserved, readable and writable by this user only.

        Raises WeightError when the memory is not there (instead of a SIGBUS at the first touch).
        """
        name = self.name(run_id, version, part, spare=spare)
        try:
            return self._create(self.folder / str(name), layout, part)
        except OSError as error:
            raise WeightError(self._cannot_create(error, layout.part_nbytes(part))) from error

    def open(self, name: str, layout: Layout, part: int = 0) -> Segment | None:
        """A segment to read from; None when it is gone.

        Raises WeightError for a name that is no segment's, or a file that is not of its size.
        """
        if SegmentName.parse(name) is None:
            raise WeightError(f"{name[:256]!r} is not the name of a weight segment")
        try:
            file = os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise WeightError(f"weight segment {self.folder / name} cannot be opened: {error.strerror}") from error
        found = os.fstat(file)
        size = _size(layout, part)
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            os.close(file)
            raise WeightError(f"weight segment {name} has {found.st_size} bytes, its manifest says {size}")
        return Segment(name, file, layout.part_nbytes(part))

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def segments(self, run_id: str | None = None) -> list[SegmentName]:
        """What lies here, of one run or of all, oldest version first; spares count as segments of no run.

        Raises WeightError when the folder is gone.
        """
        try:
            found = [SegmentName.parse(entry.name) for entry in self.folder.iterdir()]
        except OSError as error:
            raise WeightError(f"weight segments in {self.folder} cannot be listed: {error.strerror}") from error
        return sorted(
            (name for name in found if name and (run_id is None or (self._of(name, run_id) and not name.spare))),
            key=lambda name: (name.run_id, name.version),
        )

    def remove(self, name: SegmentName) -> bool:
        """Free a segment; readers keep what they have opened. False when it was gone already, or is another user's."""
        try:
            (self.folder / str(name)).unlink()
        except (FileNotFoundError, PermissionError):
            return False
        return True

    def lives(self, name: SegmentName) -> bool:
        """Whether its owner does."""
        return name.owner.lives(self.folder)

    def sweep(
        self, run_id: str | None = None, orphan_age_s: float = ORPHAN_AGE_S, *, keep_run: str | None = None
    ) -> list[SegmentName]:
        """Remove what dead owners left behind: all of `run_id`'s, and of other runs what is old enough.

        Nothing of run `keep_run`: which of its versions are still needed only its broker says.
        """
        removed = []
        for name in self.segments():
            if self.lives(name) or (self._of(name, keep_run) and not name.spare):
                continue
            if not name.spare and not self._of(name, run_id) and self._age_s(name) < orphan_age_s:
                continue
            if self.remove(name):
                removed.append(name)
        return removed

    def _of(self, name: SegmentName, run_id: str | None) -> bool:
        return (name.run_id, name.home) == (run_id, self._home)

    def _age_s(self, name: SegmentName) -> float:
        try:
            return time.time() - (self.folder / str(name)).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def _create(self, path: Path, layout: Layout, part: int) -> NewSegment:
        size = _size(layout, part)
        announce(self.folder)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, size)
            mapping = mmap.mmap(file, size)
            _populate(mapping)
            return NewSegment(path, mapping, layout.part_nbytes(part))
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(file)

    def _cannot_create(self, error: OSError, nbytes: int) -> str:
        if error.errno != errno.ENOSPC:
            return f"no weight segment can be created in {self.folder}: {error.strerror}"
        free = os.statvfs(self.folder)
        return (
            f"{self.folder} has {free.f_bavail * free.f_frsize / 1e6:.0f} MB left, a weight version needs "
            f"{nbytes / 1e6:.0f} MB; enlarge it (a container's --shm-size, HEADRACE_SHM_SIZE of compose.yaml), lower "
            f"weights.max_live_versions, or set {FOLDER_VARIABLE} to a folder with more room"
        )


def default_folder(environ: Mapping[str, str]) -> Path:
    """The folder that the environment names, else /dev/shm. Raises WeightError when neither can be written."""
    named = environ.get(FOLDER_VARIABLE)
    folder = Path(named or "/dev/shm")  # noqa: S108 - shared memory, not a temporary file; names are exclusive
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return folder
    source = f"{FOLDER_VARIABLE} = {named!r}" if named else f"{folder}"
    raise WeightError(
        f"{source} cannot be written; set {FOLDER_VARIABLE} to a folder that all services of this host share"
    )


def _progress_at(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _size(layout: Layout, part: int) -> int:
    """Of the file of a segment."""
    progress = _PROGRESS.size + DIGEST_BYTES * layout.chunks(part)
    return _progress_at(layout.part_nbytes(part)) + -(-progress // _PAGE) * _PAGE


def _populate(mapping: mmap.mmap) -> None:
    """Map all pages now: a third cheaper than a page fault each. In pieces, since madvise holds the GIL."""
    try:
        for start in range(0, len(mapping), _POPULATE_BYTES):
            mapping.madvise(_MADV_POPULATE_WRITE, start, min(_POPULATE_BYTES, len(mapping) - start))
    except OSError as error:
        # Kernels before 5.14 do not know it; pages then come as they are touched.
        if error.errno != errno.EINVAL:
            raise
