"""Whose a segment is, and whether its owner lives: also for containers that share a folder, each with pids of its own.

Within a pid namespace a process is found by its pid and its start time. Of another namespace's process nothing can be
looked up, so every owner holds a lock for as long as it lives: a read lock on one byte of the folder itself, whose
number follows from who it is (fcntl(2), open file description locks; a lock needs no byte to be there). The kernel
drops it, however the owner ends, and any process that sees the folder may ask for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FLOCK = "hhqqi0q"
"""struct flock: type, whence, start, length, pid."""
_announced: dict[tuple[int, int, int], int] = {}
"""Process, device and inode of a folder to the descriptor that holds the lock."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, told apart from a later one with the same pid, and from one of another pid namespace."""

    pid: int
    start: int
    namespace: int

    @classmethod
    def this(cls) -> Owner:
        pid = os.getpid()
        return cls(pid, _start_ticks(pid) or 0, _namespace())

    def lives(self, folder: Path) -> bool:
        """Whether it lives, which owns something in this folder; true where that cannot be found out."""
        if self.namespace == _namespace():
            return _start_ticks(self.pid) == self.start
        return _is_locked(folder, self.byte)

    @property
    def byte(self) -> int:
        """That it locks."""
        text = f"{self.pid}-{self.start}-{self.namespace}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def announce(folder: Path) -> None:
    """Let everybody who sees this folder know that this process lives, until it ends. Raises OSError for no folder."""
    found = folder.stat()
    key = (os.getpid(), found.st_dev, found.st_ino)
    if key in _announced:
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # no locks on this file system: then nobody can ask for one either
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_RDLCK, Owner.this().byte))
    _announced[key] = descriptor


def _is_locked(folder: Path, byte: int) -> bool:
    try:
        with _opened(folder) as descriptor:
            answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, byte))
    except OSError:
        return True
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def _flock(kind: int, byte: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/<pid>/stat (proc(5)): start in clock ticks after boot; None for no such process or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X", "x") else int(fields[19])
