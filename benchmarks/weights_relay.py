"""Versions between simulated hosts: what the trainer's host sends, and deltas against full versions on a slow link."""

from __future__ import annotations

import asyncio
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import numpy as np

from benchmarks.report import Figure
from benchmarks.weight_deltas import size_figures
from benchmarks.weight_steps import Versions, bfloat16_versions
from benchmarks.weights_world import (
    RUN_ID,
    SECRET,
    Host,
    Process,
    Sizes,
    as_service,
    model_layout,
    random_bytes,
    receive_bytes,
    redis_run,
    serve_bytes,
    shared_folder,
    touched,
)
from broker.connect import connect_run
from weightsync.bulk.server import BulkServer
from weightsync.codecs.ulp import Bits, moved, steps_between
from weightsync.manifest import Layout, Manifest, decode, encode
from weightsync.mirror import Mirror, Outcome
from weightsync.placement import Bytes
from weightsync.transports.tcp import TcpTransport

LINKS = {"1g": (1e9, 5.0), "100m": (1e8, 20.0)}
"""Bits per second of a link, and how many times as fast a delta must come."""
PIECE_BYTES = 64 << 10
BURST_S = 0.02
"""What a link may catch up, since it wakes up late."""
BEHIND, BEFORE = "127.0.0.2", "127.0.0.1"
"""Where a server listens that is reached through a link, and where the link does: on the same port."""


def egress(sizes: Sizes) -> dict[str, Figure]:
    """egress_4 and egress_8."""
    layout = model_layout(sizes.relay_bytes)
    figures = {}
    for count in (4, 8):
        with shared_folder() as folder, redis_run() as url:
            rounds = _relay(Host(folder, "origin"), folder, url, layout, count, sizes.repeats)
        sent, lateness = (statistics.median(column) for column in zip(*rounds, strict=True))
        figures[f"egress_{count}"] = Figure(sent, "bytes", layout.nbytes, sent / layout.nbytes, 2.0, at_most=True)
        figures[f"last_vs_first_{count}"] = Figure(lateness, "")
    return figures


def _relay(origin: Host, folder: Path, url: str, layout: Layout, count: int, repeats: int) -> list[tuple[float, float]]:
    """Of each round: bytes that the origin sent, and seconds of the last host over those of the first."""
    server = BulkServer(origin.arena, RUN_ID, SECRET)
    peers = [Process(mirror_process, url, folder, f"host-{number}", "raw", True) for number in range(count)]
    book = {"origin": server.address} | {f"host-{number}": peer.tell("where") for number, peer in enumerate(peers)}
    for peer in peers:
        peer.tell(book)
    as_service()
    data, rounds = random_bytes(layout.nbytes), []
    for step in range(1, repeats + 1):
        manifest, before, start = origin.publish(layout, step, data), server.stats().sent_bytes, time.monotonic()
        for peer in peers:
            peer.pipe.send(encode(manifest))
        ends = [_held(peer.answer(), manifest)[1] - start for peer in peers]
        rounds.append((float(server.stats().sent_bytes - before), max(ends) / min(ends)))
        origin.free(manifest.version)
    for peer in peers:
        peer.close()
    server.close()
    return rounds


def _held(answer: tuple[Outcome, float], manifest: Manifest) -> tuple[Outcome, float]:
    assert answer[0].kind == "held", answer[0]
    assert answer[0].version == manifest.version
    return answer


def mirror_process(pipe: Pipe, url: str, folder: Path, name: str, codec: str, relays: bool) -> None:
    asyncio.run(_mirror(pipe, url, folder, name, codec, relays))


async def _mirror(pipe: Pipe, url: str, folder: Path, name: str, codec: str, relays: bool) -> None:
    """A host's server and mirror. Told a book of addresses, it notes it; told a manifest, it brings that version, and
    answers the outcome and when it was there."""
    host, port = Host(folder, name), connect_run(url, RUN_ID)
    server = BulkServer(host.arena, RUN_ID, SECRET)
    book: dict[str, str] = {}
    address = server.address if relays else ""
    transport = TcpTransport(lambda: book, SECRET, RUN_ID, host=name, address=address, codec=codec)
    mirror = Mirror(host.arena, transport, port, RUN_ID, name, stopping=asyncio.Event())
    as_service()
    pipe.send(None)
    while (told := await asyncio.to_thread(pipe.recv)) is not None:
        if isinstance(told, dict):
            book.update(told)
        if not isinstance(told, bytes):
            pipe.send(server.address)
            continue
        outcome = await mirror.pull(decode(told))
        pipe.send((outcome, time.monotonic()))
        host.free(*mirror.needed())
    await transport.close()
    await asyncio.to_thread(server.close)
    await port.close()


def delta_sizes(sizes: Sizes) -> dict[str, Figure]:
    """delta_vs_entropy and delta_vs_xor."""
    versions = bfloat16_versions()
    return size_figures(versions[:3] if sizes.chain < len(versions) else versions)


def links(sizes: Sizes) -> dict[str, Figure]:
    """delta_speedup_1g and delta_speedup_100m."""
    layout, change = model_layout(sizes.model_bytes), Change(bfloat16_versions())
    figures = {}
    for name, (bits_per_s, bar) in LINKS.items():
        with shared_folder() as folder, redis_run() as url:
            full, delta, share = _pulls(Host(folder, "origin"), folder, url, layout, change, bits_per_s, sizes)
        figures[f"delta_speedup_{name}"] = Figure(full, "s", delta, full / delta, bar)
        figures[f"link_used_{name}"] = Figure(8e-9 * layout.nbytes / full, "Gb/s", *_of_link(bits_per_s, full, layout))
        figures[f"delta_share_{name}"] = Figure(share * layout.nbytes, "bytes", layout.nbytes, share)
    return figures


def _of_link(bits_per_s: float, full: float, layout: Layout) -> tuple[float, float]:
    """What a bare socket gets through the same link in a second, and what share of it the full version got."""
    data = random_bytes(int(bits_per_s / 8))
    where = serve_bytes(BEHIND, data)
    link = Process(link_process, where[1], bits_per_s)
    spent = receive_bytes((BEFORE, where[1]), touched(data.nbytes))
    link.close()
    measured = 8 * data.nbytes / spent
    print(f"link of {bits_per_s:.3g} bit/s: {measured:.4g} bit/s through a bare socket", file=sys.stderr)
    return measured / 1e9, 8 * layout.nbytes / full / measured


def _pulls(
    origin: Host, folder: Path, url: str, layout: Layout, change: Change, bits_per_s: float, sizes: Sizes
) -> tuple[float, float, float]:
    """Median seconds of a full version and of a delta through the link, and the share of bytes of the deltas."""
    server = BulkServer(origin.arena, RUN_ID, SECRET, host=BEHIND, advertise=BEFORE)
    link = Process(link_process, int(server.address.rpartition(":")[2]), bits_per_s)
    raw, auto = (Process(mirror_process, url, folder, codec, codec, False) for codec in ("raw", "auto"))
    for peer in (raw, auto):
        peer.tell({"origin": server.address})
    as_service()

    def pull(peer: Process) -> Outcome:
        return _held(peer.tell(encode(manifest)), manifest)[0]

    data = change.base(layout)
    manifest = origin.publish(layout, 0, data)
    full, delta, share = [pull(auto).seconds], [], []
    for step in range(1, sizes.link_repeats + 1):
        before, data = manifest.version, change.next(data, step)
        manifest = origin.publish(layout, step, data)
        outcome = pull(auto)
        assert outcome.delta_bytes, "the delta was not chosen"
        delta.append(outcome.seconds)
        share.append((outcome.delta_bytes + outcome.full_bytes) / layout.nbytes)
        full.append(pull(raw).seconds)
        origin.free(before, manifest.version)
    for peer in (raw, auto, link):
        peer.close()
    server.close()
    return statistics.median(full), statistics.median(delta), statistics.median(share)


class Change:
    """Changes as dense and as far as those between the last of these versions, at random places."""

    def __init__(self, versions: Versions) -> None:
        old, new = versions[-2], versions[-1]
        changed = old != new
        self._weights = old
        self._share = float(changed.mean())
        self._steps: Bits = steps_between(old[changed], new[changed])

    def base(self, layout: Layout) -> Bytes:
        """Real weights, again and again."""
        return np.resize(self._weights, layout.nbytes // 2).view(np.uint8)

    def next(self, data: Bytes, seed: int) -> Bytes:
        random = np.random.default_rng(seed)
        bits = data.view(np.uint16).copy()
        # Distances between changes at random places.
        gaps = random.geometric(self._share, int(bits.size * self._share * 1.1))
        places = np.cumsum(gaps) - 1
        places = places[places < bits.size]
        bits[places] = moved(bits[places], random.choice(self._steps, places.size))
        return bits.view(np.uint8)


class Bucket:
    """Lets so many bytes a second pass, whoever sends them. Any thread."""

    def __init__(self, bits_per_s: float) -> None:
        self._s_per_byte = 8 / bits_per_s
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - BURST_S) + nbytes * self._s_per_byte
            ahead = self._free_at - now
        if ahead > 0:
            time.sleep(ahead)


def link_process(pipe: Pipe, port: int, bits_per_s: float) -> None:
    """Stands before a server; what the server says passes at this rate."""
    bucket = Bucket(bits_per_s)
    listener = socket.create_server((BEFORE, port))

    def accept() -> None:
        while True:
            client, _ = listener.accept()
            server = socket.create_connection((BEHIND, port))
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for ends in ((server, client, bucket.take), (client, server, lambda _: None)):
                threading.Thread(target=_pass_on, args=ends, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    pipe.send(None)
    pipe.recv()


def _pass_on(source: socket.socket, sink: socket.socket, take: Callable[[int], object]) -> None:
    piece = memoryview(bytearray(PIECE_BYTES))
    try:
        while got := source.recv_into(piece):
            take(got)
            sink.sendall(piece[:got])
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        # One end is gone: so is the other, for which this is over.
        for end in (source, sink):
            end.close()
