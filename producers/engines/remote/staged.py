"""A weight version as a model folder in shared memory, which a server of this host loads without a copy of ours.

The buffer that chunks are staged into is the data of the folder's one safetensors file; all other files are links to
the model's folder. safetensors allows no bytes between two tensors, where the wire aligns each to 64 bytes. Most models
have no such gaps; where there are some, `seal` moves the tensors up to each other, towards the end of the file, and the
header, which ends in spaces, takes what that leaves free:

    while staged    8 | header, spaces | tensor, gap, tensor, gap
    sealed          8 | header, spaces            | tensor, tensor

The name says whose a folder is (as in `weightsync/arena.py`), so that what a killed producer left is found:

    headrace-<run id>-staged-<pid>-<start>-<pid namespace>-<nonce>
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import mmap
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import WeightError
from headrace.version import PolicyVersion
from weightsync.arena import FOLDER_VARIABLE, MAX_RUN_ID, default_folder
from weightsync.manifest import DTYPE_BYTES, Layout, TensorSpec
from weightsync.owners import Owner, announce

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

WEIGHTS = "model.safetensors"
_NOT_LINKED = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")
"""Weights of the model's folder: beside ours a server would load them, too."""
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_PREFIX = 8
_MAX_HEADER = 100_000_000
"""Of safetensors."""
_PAGE = 4096
_NAME = re.compile(
    r"headrace-[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
    r"-staged-(?P<pid>\d{1,10})-(?P<start>\d{1,20})-(?P<namespace>\d{1,20})-[0-9a-f]{8}"
)


class Staged:
    """One such folder, filled again and again. For one thread at a time."""

    def __init__(self, layout: Layout, model_folder: Path, run_id: str, memory: Path | None = None) -> None:
        """All of its memory is taken now. `memory` is where it lies; None is where weight segments lie.

        Raises WeightError where the memory is not there, the model's folder cannot be read, or the layout cannot be
        one file.
        """
        self.layout = layout
        self._gaps = layout.nbytes - sum(tensor.nbytes for tensor in layout.tensors)
        self._places = _sealed_places(layout)
        self._base = _base(layout, self._gaps)
        self._sealed = False
        memory = memory if memory is not None else default_folder(os.environ)
        self.folder = memory / _name(run_id)
        """Readable by this user only."""
        try:
            announce(memory)
            self.folder.mkdir(mode=0o700)
            try:
                self._map = _create(self.folder / WEIGHTS, self._base + layout.nbytes)
                _link(model_folder, self.folder)
            except OSError:
                shutil.rmtree(self.folder, ignore_errors=True)
                raise
        except OSError as error:
            raise WeightError(_cannot_stage(error, memory, layout.nbytes)) from error
        whole: Bytes = np.frombuffer(self._map, np.uint8)
        self._whole = whole
        self.computed: dict[Any, str] = {}
        """What was computed of the sealed version, by whatever names it; gone with that version."""

    @property
    def buffer(self) -> Bytes:
        """[layout.nbytes], writable, in the wire's layout. Asking for it ends what was sealed."""
        self._sealed = False
        self.computed = {}
        return self._whole[self._base :]

    @property
    def sealed(self) -> bool:
        """Whether the folder is one that loads."""
        return self._sealed

    def seal(self, version: PolicyVersion) -> None:
        """The buffer is whole: make the folder one that loads. Any thread; with gaps it copies all bytes once."""
        if self._gaps:
            self._close_gaps()
        header = _header(self.layout, self._places, str(version)).ljust(self._base + self._gaps - _PREFIX)
        start = _PREFIX + len(header)
        self._whole[:start] = np.frombuffer(len(header).to_bytes(_PREFIX, "little") + header, np.uint8)
        self.computed = {}
        self._sealed = True

    def tensor(self, spec: TensorSpec) -> Bytes:
        """[spec.nbytes] of one tensor of the sealed version, row-major."""
        assert self._sealed, "the buffer may be half of one version and half of another"
        start = self.place(spec)
        return self._whole[start : start + spec.nbytes]

    def place(self, spec: TensorSpec) -> int:
        """Where a tensor begins in the sealed file, in bytes; the next follows at its end."""
        return self._base + self._gaps + self._places[spec.name]

    @property
    def file(self) -> Path:
        return self.folder / WEIGHTS

    def close(self) -> None:
        """Remove the folder. Idempotent; the memory goes back once no view of the buffer is left."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _close_gaps(self) -> None:
        """From the last tensor on, so that none is overwritten before it has moved."""
        address, first = self._whole.ctypes.data, self._base + self._gaps
        for spec in reversed(self.layout.tensors):
            there, here = first + self._places[spec.name], self._base + spec.offset
            if there != here:
                # Unlike numpy's assignment: no memory for what overlaps, and no lock of the interpreter meanwhile.
                ctypes.memmove(address + there, address + here, spec.nbytes)


def sweep(memory: Path | None = None) -> list[str]:
    """Remove the folders of producers that are dead, of whatever run. Returns their names.

    Raises WeightError where there is no folder for segments.
    """
    memory = memory if memory is not None else default_folder(os.environ)
    removed = []
    for entry in _folders(memory):
        match = _NAME.fullmatch(entry.name)
        if match is None or Owner(int(match["pid"]), int(match["start"]), int(match["namespace"])).lives(memory):
            continue
        # Another user's stays where it is.
        shutil.rmtree(entry, ignore_errors=True)
        if not entry.exists():
            removed.append(entry.name)
    if removed:
        log.info("removed %d staged weight versions of producers that are dead", len(removed))
    return removed


def _folders(memory: Path) -> Iterator[Path]:
    try:
        yield from [entry for entry in memory.iterdir() if entry.name.startswith("headrace-")]
    except OSError as error:
        raise WeightError(f"staged weight versions in {memory} cannot be listed: {error.strerror}") from error


def _name(run_id: str) -> str:
    owner = Owner.this()
    name = f"headrace-{run_id}-staged-{owner.pid}-{owner.start}-{owner.namespace}-{secrets.token_hex(4)}"
    if len(run_id) > MAX_RUN_ID or _NAME.fullmatch(name) is None:
        raise WeightError(f"run id {run_id!r} cannot name a folder; use letters, digits, dots and dashes")
    return name


def _sealed_places(layout: Layout) -> dict[str, int]:
    """Where each tensor begins once there are no gaps, counted from the first."""
    places, place = {}, 0
    for spec in layout.tensors:
        if place % DTYPE_BYTES[spec.dtype]:
            raise WeightError(
                f"tensor {spec.name} ({spec.dtype}) would start at an odd place of a safetensors file; "
                "publish all tensors of this model in one dtype"
            )
        places[spec.name] = place
        place += spec.nbytes
    return places


def _base(layout: Layout, gaps: int) -> int:
    """Where the data begins while it is staged: a page's boundary behind the longest header."""
    longest = _PREFIX + len(_header(layout, _sealed_places(layout), "9" * 40))
    base = -(-longest // _PAGE) * _PAGE
    if base + gaps > _MAX_HEADER:
        raise WeightError(f"a model of {len(layout.tensors)} tensors has more names than a safetensors header holds")
    return base


def _header(layout: Layout, places: dict[str, int], version: str) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "version": version}}
    for spec in layout.tensors:
        start = places[spec.name]
        entries[spec.name] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, start + spec.nbytes],
        }
    return json.dumps(entries, separators=(",", ":")).encode()


def _create(path: Path, size: int) -> mmap.mmap:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        # Now, instead of a SIGBUS at the first touch of memory that is not there.
        os.posix_fallocate(file, 0, size)
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def _link(model_folder: Path, folder: Path) -> None:
    for file in model_folder.iterdir():
        if file.is_file() and not file.name.endswith(_NOT_LINKED):
            (folder / file.name).symlink_to(file.resolve())


def _cannot_stage(error: OSError, memory: Path, nbytes: int) -> str:
    if error.errno == errno.ENOSPC:
        free = os.statvfs(memory)
        return (
            f"{memory} has {free.f_bavail * free.f_frsize / 1e6:.0f} MB left, a staged weight version needs "
            f"{nbytes / 1e6:.0f} MB; enlarge it (a container's --shm-size) or set {FOLDER_VARIABLE} to a folder "
            "with more room"
        )
    if error.errno == errno.EFBIG:
        return (
            f"a staged weight version needs a file of {nbytes / 1e6:.0f} MB in {memory}, which is over this process's "
            "limit; raise it (ulimit -f)"
        )
    return f"no weight version can be staged in {memory}: {error.strerror or error} ({error.filename or memory})"
