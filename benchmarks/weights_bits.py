"""Whether versions keep all their bits: over a long chain of deltas between hosts, and of whatever bits there are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.broker import create
from benchmarks.report import Figure
from benchmarks.weight_steps import training
from benchmarks.weights_world import RUN_ID, SECRET, Host, Sizes, as_service, shared_folder, version
from broker.connect import connect_run
from headrace.policy.loading import layout_of
from weightsync import codecs
from weightsync.bulk.server import BulkServer
from weightsync.bulk.shelf import Shelf
from weightsync.manifest import DTYPE_BYTES, Layout, decode
from weightsync.mirror import Mirror
from weightsync.placement import Bytes
from weightsync.publisher import Publisher
from weightsync.transports.tcp import TcpTransport

LIVE_VERSIONS = 3
LEASE_S = 600.0


def exact(sizes: Sizes) -> dict[str, Figure]:
    """exact: versions of a training that came as deltas with all their bits, and random deltas."""
    with shared_folder() as folder:
        chain = asyncio.run(_chain(folder, sizes.chain))
    right = chain + sum(_delta_is_exact(seed) for seed in range(sizes.deltas))
    of = sizes.chain + sizes.deltas
    return {"exact": Figure(right, "exact", of, right / of, 1.0)}


async def _chain(folder: Path, steps: int) -> int:
    """So many versions after the first came to another host, each as a delta of the one before, with all bits."""
    await create("memory:chain", RUN_ID)
    port = connect_run("memory:chain", RUN_ID)
    fence, here, there = await port.take_fence(0), Host(folder, "here"), Host(folder, "there")
    server = BulkServer(here.arena, RUN_ID, SECRET)
    transport = TcpTransport(lambda: {"here": server.address}, SECRET, RUN_ID, host="there", codec="sparse-ulp")
    mirror = Mirror(there.arena, transport, port, RUN_ID, "there", stopping=asyncio.Event())
    publisher: Publisher | None = None
    as_service()
    right = 0
    for step, model in enumerate(training(steps)):
        layout = Layout.of(layout_of(model, "bfloat16"), chunk_bytes=1 << 20)
        publisher = publisher or Publisher(port, fence, layout, RUN_ID, LIVE_VERSIONS, host="here", arena=here.arena)
        await publisher.publish(version(step), dict(model.named_parameters()))
        await publisher.sealed()
        manifest = await port.manifest(version(step))
        assert manifest is not None
        outcome = await mirror.pull(decode(manifest))
        came = _there(there, layout, step)
        right += (
            step > 0 and outcome.delta_bytes > 0 and came is not None and np.array_equal(came, _bits(model, layout))
        )
        there.free(version(step))
        # The base of the next delta stays at its origin.
        await port.lease(version(step), "there", LEASE_S)
        if step:
            await port.release(version(step - 1), "there")
    assert publisher is not None
    await publisher.close()
    await transport.close()
    await asyncio.to_thread(server.close)
    await port.close()
    return right


def _bits(model: Any, layout: Layout) -> Bytes:
    """What a version of this model must be, made without what is measured."""
    out = np.zeros(layout.nbytes, np.uint8)
    for spec, parameter in zip(layout.tensors, model.parameters(), strict=True):
        out[spec.offset : spec.end] = parameter.detach().bfloat16().flatten().view(torch.uint8).numpy()
    return out


def _there(host: Host, layout: Layout, step: int) -> Bytes | None:
    held = Shelf(host.arena, RUN_ID).whole(version(step), 0, layout.nbytes, layout.chunk_bytes)
    if held is None:
        return None
    out = np.zeros(layout.nbytes, np.uint8)
    held.segment.read(0, [out.data])
    held.close()
    return out


def _delta_is_exact(seed: int) -> bool:
    """Of random bit patterns, any dtype, any codec, any density of changes."""
    random = np.random.default_rng(seed)
    dtype = [*DTYPE_BYTES][seed % len(DTYPE_BYTES)]
    codec = codecs.get(("sparse-ulp", "sparse-abs")[seed // len(DTYPE_BYTES) % 2])
    base = np.frombuffer(random.bytes(int(random.integers(0, 5000)) * DTYPE_BYTES[dtype]), np.uint8).copy()
    new = np.where(random.random(base.size) < random.random() ** 4, random.integers(0, 256, base.size), base)
    new = new.astype(np.uint8)
    codec.decode(codec.encode(base, new, dtype), base, dtype)
    return np.array_equal(base, new)
