"""Sharded checkpoints: each rank writes what it has of a model that is spread over several, while steps go on.

torch.distributed.checkpoint plans and writes, in its safetensors form: a file per rank, in which each tensor says where
it begins. So what was written by any number of ranks is read by any other, or by one process alone. Nothing that is
read is unpickled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from consumers.ranks.channel import Channel
from headrace.errors import CheckpointError

Digest = Callable[[Path], str]


class Writing:
    """The checkpoints of one rank, one after the other. Every call is made by all ranks."""

    def __init__(self, channel: Channel, rank: int, around: Callable[[], AbstractContextManager[None]]) -> None:
        """`channel` is used by its thread alone, and what that does is done in `around`."""
        self._around = around
        self._channel = channel
        self._rank = rank
        gpu = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=gpu
            )
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def begin(self, tensors: Mapping[str, torch.Tensor], folder: Path, digest: Digest) -> Future[dict[str, str]]:
        """Copy the tensors, and write them into a folder that is there: name of each file to its digest, synced.

        The future raises CheckpointError on all ranks where one cannot write, RuntimeError where one is gone.
        """
        written = async_save(
            dict(tensors),
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
            process_group=self._channel.group,
            async_stager=self._stager,
        )

        def finish() -> dict[str, str]:
            with self._around():
                return self._finish(written, folder, digest)

        return self._thread.submit(finish)

    def _finish(self, written: Any, folder: Path, digest: Digest) -> dict[str, str]:
        try:
            written.result()
        except CheckpointException as error:
            raise CheckpointError(_reason(error)) from error
        mine: dict[str, str] | str
        try:
            mine = {file.name: digest(file) for file in folder.glob(f"shard-{self._rank + 1:05d}-*.safetensors")}
        except OSError as error:
            mine = str(error.strerror).lower()
        found: dict[str, str] = {}
        for said in self._channel.gather(msgspec.msgpack.encode(mine)):
            files = msgspec.msgpack.decode(said)
            if isinstance(files, str):
                raise CheckpointError(files)
            found |= files
        return found


def sizes(folder: Path) -> dict[str, torch.Size]:
    """Of all tensors, by name. Raises OSError, ValueError, SafetensorError."""
    return {name: one.size for name, one in _stored(folder)}


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors, whole, by one process. Raises as `sizes`."""
    tensors = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in _stored(folder)}
    read_into(tensors, folder)
    return tensors


def read_into(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Fill these, whole or sharded: of a file, only the rows that are asked for are read. Raises as `sizes`."""
    with _alone():
        load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def _stored(folder: Path) -> list[tuple[str, TensorStorageMetadata]]:
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return [(name, one) for name, one in found.items() if isinstance(one, TensorStorageMetadata)]


def _reason(error: CheckpointException) -> str:
    for rank, (cause, _) in sorted(error.failures.items()):
        text = getattr(cause, "strerror", None) or str(cause)
        return f"rank {rank}: {text.splitlines()[0].lower() if text else type(cause).__name__}"
    return "some rank could not write"


@contextmanager
def _alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
