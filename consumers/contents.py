"""Contents: the weights that a version was published with, as far as they can still be had here.

They are what was published, in the wire's dtype, wherever they come from: the float32 weights of a checkpoint are
rounded as they were then. So a rollback that is made again gives the same bits, from memory or from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from broker.connect import Run
from consumers import checkpoint
from consumers.parts import Parts
from consumers.worker import Worker
from headrace.errors import CheckpointError, WireError
from headrace.version import PolicyVersion
from weightsync.arena import Arena
from weightsync.manifest import Layout, decode
from weightsync.placement import Bytes
from weightsync.transports.api import Unavailable
from weightsync.whole import read_whole

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""The wire's."""


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    tensors: Mapping[str, torch.Tensor]
    """By parameter name, of the layout's shapes and dtypes, on the CPU."""
    source: str
    """Where they were read."""


class Contents:
    """Of one run, as its trainer finds them: in its host's memory, else in the run's folder."""

    def __init__(self, port: Run, parts: Parts, worker: Worker) -> None:
        self._port = port
        self._parts = parts
        self._worker = worker

    async def read(self, version: PolicyVersion) -> Content | Unavailable:
        """Every byte compared with its digest. Raises BrokerUnavailable."""
        found = await self._in_memory(version)
        if isinstance(found, Content):
            return found
        folder = checkpoint.folder_of(self._parts.folder, version)
        if not folder.is_dir():
            return Unavailable(f"{found.reason}; and the run's folder has no checkpoint of exactly that version")
        return await self._worker(lambda: self._in_checkpoint(folder))

    async def _in_memory(self, version: PolicyVersion) -> Content | Unavailable:
        data = await self._port.manifest(version)
        if data is None:
            return Unavailable(f"version {version} is not in any host's memory (any more)")
        try:
            manifest = decode(data)
        except WireError as error:
            return Unavailable(str(error))
        if manifest.layout.tensors != self._parts.layout.tensors:
            return Unavailable(f"version {version} has another layout than this trainer's model")
        read = await read_whole(manifest, Arena())
        if isinstance(read, Unavailable):
            return read
        return Content(tensors_of(manifest.layout, read), "memory")

    def _in_checkpoint(self, folder: Path) -> Content | Unavailable:
        try:
            loaded = checkpoint.load(folder)
        except CheckpointError as error:
            return Unavailable(str(error))
        specs = self._parts.layout.tensors
        if {name: tuple(tensor.shape) for name, tensor in loaded.model.items()} != {s.name: s.shape for s in specs}:
            return Unavailable(f"checkpoint {folder} is of another model than this trainer's")
        return Content({spec.name: loaded.model[spec.name].to(DTYPES[spec.dtype]) for spec in specs}, str(folder))


def tensors_of(layout: Layout, data: Bytes) -> dict[str, torch.Tensor]:
    """Views of a whole version [layout.nbytes], by name."""
    flat = torch.from_numpy(data)
    return {
        spec.name: flat[spec.offset : spec.end].view(DTYPES[spec.dtype]).view(spec.shape) for spec in layout.tensors
    }
