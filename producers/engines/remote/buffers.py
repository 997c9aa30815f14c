"""The two places of a version: what the servers have, and what is being staged."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.version import PolicyVersion
from producers.engines.remote.staged import Bytes, Staged
from weightsync.manifest import Layout


class Buffers:
    """Front and back. Each is a model folder in shared memory as large as the model."""

    def __init__(self, model_folder: Path) -> None:
        self._model_folder = model_folder
        self.run_id = "local"
        self.front: Staged | None = None
        self._back: Staged | None = None
        self._handed_out = False

    def back(self, layout: Layout) -> Bytes:
        """[layout.nbytes] to stage into. Raises WeightError."""
        if self._back is not None and self._back.layout != layout:
            self._back.close()
            self._back = None
        if self._back is None:
            self._back = Staged(layout, self._model_folder, self.run_id)
        self._handed_out = True
        return self._back.buffer

    async def turn(self, version: PolicyVersion) -> Staged | None:
        """Seal what was staged and make it the front; without that the front stays. None where there is none."""
        if self._handed_out:
            assert self._back is not None
            await asyncio.to_thread(self._back.seal, version)
            self.front, self._back = self._back, self.front
            self._handed_out = False
        return self.front

    def close(self) -> None:
        """Idempotent."""
        for staged in (self.front, self._back):
            if staged is not None:
                staged.close()
        self.front = self._back = None
