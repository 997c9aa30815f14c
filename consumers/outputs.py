"""Outputs: files and folders of the run that only a trainer which still has it may write."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from consumers import placing
from headrace.errors import CheckpointError


class Outputs:
    """Prepared beside their places, put there once the fence was asked."""

    def __init__(self, folder: Path, incarnation: int, confirm: Callable[[], Awaitable[None]]) -> None:
        self._folder = folder
        self._incarnation = incarnation
        self._confirm = confirm

    async def write_json(self, name: str, value: Any) -> Path:
        """Replace a JSON file whole. Raises CheckpointError when it cannot be written, Fenced."""
        final = self._folder / name
        work = placing.beside(final, self._incarnation)
        try:
            await asyncio.to_thread(_write, work, json.dumps(value, indent=2, sort_keys=True) + "\n")
            await self._confirm()
            placing.place(work, final)
        except OSError as error:
            raise CheckpointError(f"{final} cannot be written: {error.strerror}") from error
        finally:
            placing.remove(work)
        return final

    async def write_folder(self, name: str, prepare: Callable[[Path], Awaitable[None]]) -> Path:
        """Replace a folder by what `prepare` writes into the path that it is given. Raises CheckpointError, Fenced."""
        final = self._folder / name
        work = placing.beside(final, self._incarnation)
        try:
            await prepare(work)
            await self._confirm()
            await asyncio.to_thread(placing.place, work, final)
        except OSError as error:
            raise CheckpointError(f"{final} cannot be written: {error.strerror}") from error
        finally:
            await asyncio.to_thread(placing.remove, work)
        return final


def _write(file: Path, text: str) -> None:
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
