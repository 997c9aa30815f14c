"""What the benchmarks of weight synchronisation share: sizes, a model's layout, hosts that publish, processes.

Hosts are folders in shared memory: each has an arena of its own, so that nothing of another host is found in it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.broker import Peer, create
from deploy.redis_server import RedisServer
from headrace.policy.loading import layout_of
from headrace.policy.memory import keep_freed_memory
from headrace.service import collect_seldom
from headrace.version import PolicyVersion
from weightsync.arena import Arena, default_folder
from weightsync.digests import digest_of
from weightsync.manifest import Layout, Manifest, Part
from weightsync.placement import Bytes, chunk_bounds

RUN_ID = "weights"
SECRET = bytes(range(32))
LAYERS = 30
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["benchmarks.weights_world"])
"""Importing torch takes longer than much of what is measured here."""


@dataclass(frozen=True, slots=True)
class Sizes:
    model_bytes: int = 600_000_000
    relay_bytes: int = 64_000_000
    repeats: int = 5
    link_repeats: int = 2
    """Of the pulls over each shaped link."""
    swaps: int = 1000
    commits: int = 300
    window_s: float = 10.0
    """Decoding with staging, and without."""
    staged: str = "smollm2"
    """The model that decodes meanwhile; empty is a narrow one."""
    publishes: int = 20
    chain: int = 200
    deltas: int = 10_000


SMALL = Sizes(
    model_bytes=24_000_000, relay_bytes=16_000_000, repeats=2, link_repeats=1, swaps=50, commits=20, window_s=1.0,
    staged="", publishes=4, chain=5, deltas=200,
)  # fmt: skip


def llama(nbytes: int) -> LlamaConfig:
    """With 30 layers, thus 272 tensors, which take about so many bytes in bfloat16."""
    # 55 widths of vocabulary, and per layer 2 1/2 squares of attention and 8 of the feed-forward network.
    width = max(64, 32 * round((nbytes / 2 / (55 + LAYERS * 10.5)) ** 0.5 / 32))
    return LlamaConfig(
        vocab_size=55 * width,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


def model_layout(nbytes: int) -> Layout:
    """Of such a model on the wire."""
    return layout_on_wire(llama(nbytes))


def layout_on_wire(config: LlamaConfig) -> Layout:
    with torch.device("meta"):
        return Layout.of(layout_of(LlamaForCausalLM(config), "bfloat16"))


def version(step: int) -> PolicyVersion:
    return PolicyVersion(1, step)


def random_bytes(nbytes: int, seed: int = 0) -> Bytes:
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)


def touched(nbytes: int) -> Bytes:
    """Memory as an engine has it, whose pages are there: torch aligns it, which halves the time of a read into it."""
    buffer: Bytes = torch.empty(nbytes, dtype=torch.uint8).fill_(1).numpy()
    return buffer


class Host:
    """A folder of segments, and what is published there without a trainer."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        (folder / name).mkdir(exist_ok=True)
        self.arena = Arena(folder / name)

    def publish(self, layout: Layout, step: int, data: Bytes) -> Manifest:
        """A sealed version of these bytes."""
        segment = self.arena.create(RUN_ID, version(step), layout)
        np.copyto(np.frombuffer(segment.data, np.uint8), data)
        digests = tuple(digest_of([data[start:end].data]) for start, end in chunk_bounds(layout, 0))
        segment.grow(digests)
        segment.seal()
        return self._manifest(layout, step, segment.name, digests)

    def again(self, manifest: Manifest, step: int) -> Manifest:
        """A version of the same bytes, in the same memory."""
        name = str(self.arena.name(RUN_ID, version(step)))
        os.link(self.arena.folder / manifest.parts[0].segment, self.arena.folder / name)
        return self._manifest(manifest.layout, step, name, manifest.parts[0].digests)

    def free(self, *kept: PolicyVersion | None) -> None:
        """All but these."""
        for name in self.arena.segments(RUN_ID):
            if name.version not in kept:
                self.arena.remove(name)

    def _manifest(self, layout: Layout, step: int, segment: str, digests: tuple[bytes, ...]) -> Manifest:
        part = Part(self.name, segment, digests)
        return Manifest(version(step), layout, (part,), True, RUN_ID, time.time())


class Process(Peer):
    """As a peer; forked from a process that has torch in it."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self.pipe, theirs = FORKS.Pipe()
        self._process = FORKS.Process(target=target, args=(theirs, *args), daemon=True)  # type: ignore[assignment]
        self._process.start()
        theirs.close()
        self.answer()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid


class BareEngine:
    """Two touched buffers and a version: what a receiver needs of an engine."""

    def __init__(self, layout: Layout) -> None:
        self.version: PolicyVersion | None = None
        self._front, self._back = touched(layout.nbytes), touched(layout.nbytes)

    def back_buffer(self, layout: Layout) -> Bytes:
        return self._back

    async def commit(self, version: PolicyVersion) -> float:
        self._front, self._back = self._back, self._front
        self.version = version
        return 0.0


@contextmanager
def shared_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=default_folder(os.environ), prefix="headrace-benchmark-") as folder:
        yield Path(folder)


@contextmanager
def redis_run() -> Iterator[str]:
    """The URL of a Redis with one run."""
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder), Path(folder) / "log")
        server.start()
        try:
            asyncio.run(create(server.url, RUN_ID))
            yield server.url
        finally:
            server.stop()


def as_service() -> None:
    """What every service does at its start; and one thread for torch, as a launcher gives it."""
    keep_freed_memory()
    torch.set_num_threads(1)
    collect_seldom()


def serve(pipe: Pipe, answer: Callable[[Any], Any]) -> None:
    """A process that answers what it is told, until that is None."""
    pipe.send(None)
    while (told := pipe.recv()) is not None:
        pipe.send(answer(told))


def serve_bytes(host: str, data: Bytes) -> tuple[str, int]:
    """Where a bare socket sends all of this to whoever connects."""
    listener = socket.create_server((host, 0))

    def send() -> None:
        while True:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(data.data)

    threading.Thread(target=send, daemon=True).start()
    where: tuple[str, int] = listener.getsockname()
    return where


def receive_bytes(where: tuple[str, int], out: Bytes) -> float:
    """Seconds from connecting until all of `out` came from a bare socket."""
    start, at = time.perf_counter(), 0
    with socket.create_connection(where) as sock:
        while at < out.nbytes:
            at += sock.recv_into(out.data[at:])
    return time.perf_counter() - start


def memcpy_s(out: Bytes, data: Bytes) -> float:
    return seconds(lambda: np.copyto(out, data))


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def rate(nbytes: int, taken: list[float]) -> float:
    """GB/s of the median."""
    return nbytes / statistics.median(taken) / 1e9


def p99(values: list[float]) -> float:
    return float(np.percentile(values, 99))
