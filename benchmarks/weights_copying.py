"""Full versions over loopback TCP and out of shared memory, and the trainer's own copy, against what copies at all."""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import torch
import torch.distributed

from benchmarks.broker import create
from benchmarks.report import Figure
from benchmarks.weights_world import (
    RUN_ID,
    SECRET,
    BareEngine,
    Host,
    Process,
    Sizes,
    as_service,
    memcpy_s,
    model_layout,
    random_bytes,
    rate,
    receive_bytes,
    seconds,
    serve,
    serve_bytes,
    shared_folder,
    touched,
    version,
)
from broker.connect import connect_run
from weightsync.bulk.server import BulkServer
from weightsync.commits import Commit
from weightsync.digests import Pace
from weightsync.filling import shape_of
from weightsync.manifest import Layout, Manifest, decode, encode
from weightsync.placement import Placement
from weightsync.publisher import Publisher
from weightsync.receiver import Receiver
from weightsync.staging import ROUND_CHUNKS
from weightsync.transports.api import Unavailable
from weightsync.transports.shm import ShmTransport
from weightsync.transports.tcp import TcpTransport


def tcp(sizes: Sizes) -> dict[str, Figure]:
    """tcp_vs_socket, and gloo beside it."""
    layout, port = model_layout(sizes.model_bytes), _free_port()
    with shared_folder() as folder:
        source = Process(source_process, folder, layout)
        sink = Process(sink_process, layout, *source.tell("where"))
        pair = [Process(gloo_process, rank, port, layout.nbytes) for rank in range(2)]
        taken: dict[str, list[float]] = {"memcpy": [], "socket": [], "gloo": [], "tcp": []}
        for repeat in range(sizes.repeats + 1):
            for way, times in taken.items():
                spent = _broadcast(pair) if way == "gloo" else sink.tell(way)
                # Of the first round, connections and pages are new.
                if repeat:
                    times.append(spent)
        for peer in (source, sink, *pair):
            peer.close()
    memcpy, bare, gloo, ours = (rate(layout.nbytes, times) for times in taken.values())
    return {
        "tcp_vs_socket": Figure(ours, "GB/s", bare, ours / bare, 0.70),
        "tcp_vs_gloo": Figure(ours, "GB/s", gloo, ours / gloo),
        "socket_vs_memcpy": Figure(bare, "GB/s", memcpy, bare / memcpy),
    }


def source_process(pipe: Pipe, folder: Path, layout: Layout) -> None:
    """Has one version, for the transport and for a bare socket."""
    data, host = random_bytes(layout.nbytes), Host(folder, "source")
    manifest = host.publish(layout, 1, data)
    server = BulkServer(host.arena, RUN_ID, SECRET)
    bare = serve_bytes("127.0.0.1", data)
    as_service()
    serve(pipe, lambda _: (encode(manifest), server.address, bare))
    server.close()


def sink_process(pipe: Pipe, layout: Layout, manifest: bytes, address: str, bare: tuple[str, int]) -> None:
    """Brings it into the same buffer, in the way that it is told."""
    out, other = touched(layout.nbytes), touched(layout.nbytes)
    transport = TcpTransport(lambda: {"source": address}, SECRET, RUN_ID, host="sink")
    ways: dict[str, Callable[[], float]] = {
        "memcpy": lambda: memcpy_s(out, other),
        "socket": lambda: receive_bytes(bare, out),
        "tcp": lambda: asyncio.run(_pull(transport, decode(manifest), Placement(layout, 0, out))),
    }
    as_service()
    serve(pipe, lambda way: ways[way]())
    asyncio.run(transport.close())


async def _pull(transport: TcpTransport, manifest: Manifest, place: Placement) -> float:
    """Seconds until all chunks are in their places and have their digests; rounds as a receiver asks for them."""
    start = time.perf_counter()
    source = await transport.open(manifest, 0)
    assert not isinstance(source, Unavailable), source.reason
    digests: list[bytes] = []
    while (at := len(digests)) < len(place.bounds):
        came = await source.fetch(range(at, min(at + ROUND_CHUNKS, len(place.bounds))), place, Pace())
        assert not isinstance(came, Unavailable), came.reason
        digests += came
    assert tuple(digests) == manifest.parts[0].digests
    taken = time.perf_counter() - start
    await source.close()
    return taken


def gloo_process(pipe: Pipe, rank: int, port: int, nbytes: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    as_service()

    def broadcast(_: object) -> float:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        torch.distributed.barrier()
        start = time.perf_counter()
        torch.distributed.broadcast(tensor, 0)
        return time.perf_counter() - start

    serve(pipe, broadcast)
    torch.distributed.destroy_process_group()


def _broadcast(pair: list[Process]) -> float:
    for peer in pair:
        peer.pipe.send(True)
    return max(float(peer.answer()) for peer in pair)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def shm(sizes: Sizes) -> dict[str, Figure]:
    """shm_vs_memcpy."""
    layout = model_layout(sizes.model_bytes)
    with shared_folder() as folder:
        copied, committed = asyncio.run(_commits(Host(folder, "host"), layout, sizes.repeats))
    memcpy, ours = rate(layout.nbytes, copied), rate(layout.nbytes, committed)
    return {"shm_vs_memcpy": Figure(ours, "GB/s", memcpy, ours / memcpy, 0.35)}


async def _commits(host: Host, layout: Layout, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of memcpy between touched buffers, and from the seal of a version to its commit."""
    await create("memory:shm", RUN_ID)
    port = connect_run("memory:shm", RUN_ID)
    fence = await port.take_fence(0)
    commits: asyncio.Queue[Commit] = asyncio.Queue()
    transport = ShmTransport(host.name, host.arena)
    receiver = Receiver(
        port, BareEngine(layout), "producer", host.name,
        run_id=RUN_ID, share=1.0, transport=transport, on_commit=commits.put_nowait,
    )  # fmt: skip
    stopping = asyncio.Event()
    task = asyncio.create_task(receiver.run(stopping))
    first = host.publish(layout, 0, random_bytes(layout.nbytes))
    out, data = touched(layout.nbytes), touched(layout.nbytes)
    as_service()
    copied, committed = [], []
    for step in range(1, repeats + 2):
        copied.append(memcpy_s(out, data))
        manifest = replace(host.again(first, step), sealed_s=time.time())
        await port.publish_head(fence, version(step), encode(manifest))
        committed.append((await commits.get()).latency_s)
    stopping.set()
    await task
    await port.close()
    # The first version meets a receiver that has not begun.
    return copied[1:], committed[1:]


def publishing(sizes: Sizes) -> dict[str, Figure]:
    """publish_stall."""
    layout = model_layout(sizes.model_bytes)
    with shared_folder() as folder:
        cast, published = asyncio.run(_publishes(Host(folder, "host"), layout, sizes.repeats))
    baseline, stall = statistics.median(cast), statistics.median(published)
    return {"publish_stall": Figure(stall, "s", baseline, stall / baseline, 1.3, at_most=True)}


async def _publishes(host: Host, layout: Layout, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of a cast into a touched buffer, and of `publish`, in steady state."""
    await create("memory:publish", RUN_ID)
    port = connect_run("memory:publish", RUN_ID)
    publisher = Publisher(port, await port.take_fence(0), layout, RUN_ID, 3, host=host.name, arena=host.arena)
    tensors = {spec.name: torch.rand(shape_of(spec, 0, 1)) for spec in layout.tensors}
    wire = torch.from_numpy(touched(layout.nbytes))
    places = [(tensors[spec.name], wire[spec.offset : spec.end].view(torch.bfloat16).view(spec.shape))
              for spec in layout.tensors]  # fmt: skip

    def cast() -> None:
        for tensor, place in places:
            place.copy_(tensor)

    as_service()
    casts, published = [], []
    for step in range(repeats + 3):
        casts.append(await asyncio.to_thread(seconds, cast))
        published.append(await _seconds(publisher.publish(version(step), tensors)))
        await publisher.sealed()
    await publisher.close()
    await port.close()
    # Then segments are freed as often as they are made.
    return casts[3:], published[3:]


async def _seconds(publish: Awaitable[bool]) -> float:
    start = time.perf_counter()
    assert await publish, "a version was skipped"
    return time.perf_counter() - start
