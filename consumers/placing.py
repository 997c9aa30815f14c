"""Placing: a result is seen whole, and only a trainer that still has the run may put one in its place.

It is prepared beside its place, under a name with the trainer's incarnation; then the fence is asked; then it is
renamed. A trainer that takes the run removes what earlier ones had prepared (`sweep`). So one that was stopped at any
point, even between the answer of the fence and the renaming, finds nothing to rename when it wakes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

_PREPARED = re.compile(r"\..+\.([0-9]{1,10})\.writing")
_HERE, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of renameat2(2)."""


def beside(final: Path, incarnation: int) -> Path:
    """Where this incarnation prepares what shall stand at `final`."""
    return final.with_name(f".{final.name}.{incarnation}.writing")


def place(work: Path, final: Path) -> None:
    """Put a file or folder in its place, where it replaces what was there. Raises OSError, with that intact.

    Of a link the link is replaced, and what it leads to stays.
    """
    if not final.is_dir() and not final.is_symlink():
        work.replace(final)
        return
    _exchange(work, final)
    remove(work)


def remove(path: Path) -> None:
    """A file, folder or link, whether it is there or not; what cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def sweep(folders: Iterable[Path], incarnation: int) -> None:
    """Remove what older incarnations prepared in these folders. Call it once the fence is held."""
    for folder in folders:
        for path in folder.glob(".*.writing"):
            prepared = _PREPARED.fullmatch(path.name)
            if prepared and int(prepared[1]) < incarnation:
                gone = path.with_name(f"{path.name}.swept")
                # Renamed first: whoever wakes meanwhile places all of it or nothing.
                with contextlib.suppress(OSError):
                    path.rename(gone)
        for path in folder.glob(".*.writing.swept"):
            remove(path)


def _exchange(work: Path, final: Path) -> None:
    """Two folders change places at once; where the file system cannot, one after the other."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2") and not libc.renameat2(
        _HERE, os.fsencode(work), _HERE, os.fsencode(final), _EXCHANGE
    ):
        return
    if not work.exists():
        raise FileNotFoundError(ctypes.get_errno(), "it was removed by a newer trainer", str(work))
    aside = work.with_name(f"{work.name}.aside")
    final.rename(aside)
    try:
        work.rename(final)
    except OSError:
        aside.rename(final)
        raise
    aside.rename(work)
