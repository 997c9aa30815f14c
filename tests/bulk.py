"""What the tests of bulk transfer share: versions in arenas of several hosts, their servers, and a wire that breaks."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.version import PolicyVersion
from weightsync.arena import Arena, NewSegment
from weightsync.bulk.server import BulkServer
from weightsync.digests import Pace, digest_of
from weightsync.manifest import Layout, Manifest, Part
from weightsync.placement import Bytes, Placement
from weightsync.transports.api import Source, Unavailable
from weightsync.transports.tcp import TcpTransport

RUN = "bulk-run"
SECRET = secrets.token_bytes(32)
VERSION = PolicyVersion(1, 7)
LAYOUT = Layout.of([("a", "bfloat16", (64, 40)), ("b", "float32", (333,)), ("c", "float16", (50, 7))], chunk_bytes=1024)


def content(layout: Layout, seed: int = 0, part: int = 0) -> Bytes:
    """Of one part: random bytes."""
    return np.random.default_rng(seed).integers(0, 256, layout.part_nbytes(part), dtype=np.uint8)


def changed(data: Bytes, share: float, seed: int) -> Bytes:
    """With this share of its 16 bit elements changed, mostly by one."""
    rng = np.random.default_rng(seed)
    new = data.copy()
    elements = new[: new.nbytes // 8 * 8].view(np.uint16)
    places = np.flatnonzero(rng.random(elements.size) < share)
    elements[places] += np.where(rng.random(places.size) < 0.9, 1, 1000).astype(np.uint16)
    return new


def digests(layout: Layout, data: Bytes) -> list[bytes]:
    """Of the chunks of a part, made without the code under test but for the hash."""
    step = layout.chunk_bytes
    return [digest_of([data[at : at + step].data]) for at in range(0, data.nbytes, step)]


@dataclass
class Publication:
    """A version of one part on its host, which becomes ready as the test says."""

    segment: NewSegment
    manifest: Manifest
    data: Bytes
    grown: int = 0

    def grow(self, chunks: int) -> None:
        """So many more are ready."""
        known = digests(self.manifest.layout, self.data)
        self.segment.grow(known[self.grown : self.grown + chunks])
        self.grown += chunks

    @property
    def sealed(self) -> Manifest:
        part = replace(self.manifest.parts[0], digests=tuple(digests(self.manifest.layout, self.data)))
        return replace(self.manifest, parts=(part,), sealed=True)


@dataclass
class Site:
    """A host: a folder of segments and its bulk server."""

    name: str
    arena: Arena
    server: BulkServer
    book: dict[str, str]

    def publish(
        self,
        version: PolicyVersion = VERSION,
        layout: Layout = LAYOUT,
        *,
        seed: int = 0,
        data: Bytes | None = None,
        chunks: int | None = None,
    ) -> Publication:
        """Of one part, whole, or the first `chunks` of it."""
        segment = self.arena.create(RUN, version, layout)
        data = content(layout, seed) if data is None else data
        segment.data[:] = data.data
        manifest = Manifest(version, layout, (Part(self.name, segment.name),), False, RUN)
        publication = Publication(segment, manifest, data)
        publication.grow(layout.chunks(0) if chunks is None else chunks)
        if chunks is None:
            segment.seal()
        return publication

    def transport(self, *, relay: bool = True, **options: Any) -> TcpTransport:
        if relay:
            options = {"address": self.server.address, "deltas": self.server.deltas, **options}
        return TcpTransport(lambda: self.book, SECRET, RUN, host=self.name, **options)


class Sites:
    """Hosts that know each other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.book: dict[str, str] = {}
        self.all: list[Site] = []

    def __call__(self, name: str, **options: Any) -> Site:
        arena = Arena(self._folder / name)
        arena.folder.mkdir()
        server = BulkServer(arena, RUN, SECRET, **options)
        self.book[name] = server.address
        self.all.append(Site(name, arena, server, self.book))
        return self.all[-1]

    def close(self) -> None:
        for site in self.all:
            site.server.close()
            assert site.server.connections == site.server.uploads == 0


async def pull(source: Source, layout: Layout = LAYOUT, *, part: int = 0, step: int = 3) -> Bytes:
    """All chunks of a part, a few at a time, into a buffer of the layout."""
    out = np.zeros(layout.nbytes, np.uint8)
    place = Placement(layout, part, out)
    at = 0
    while at < len(place.bounds):
        got = await source.fetch(range(at, min(at + step, len(place.bounds))), place, Pace())
        assert not isinstance(got, Unavailable), got.reason
        at += len(got)
    return out


@dataclass
class Wire:
    """Stands before a server and passes on what both say, with one fault in the first connection that gets there."""

    server: str
    flip: int = -1
    """This byte of what the server says is changed."""
    cut: int = -1
    """The connection ends after so many bytes of it."""
    flip_request: int = -1
    """As `flip`, of what the client says."""
    hits: int = 0
    """Faults that happened."""
    said: int = 0
    """Bytes that the server has said in all connections."""
    address: str = ""
    _sockets: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        host, port = self.server.rsplit(":", 1)
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((host, int(port)))
                self._sockets += [client, server]
                threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, request: bool) -> None:
        at = 0
        with contextlib.suppress(OSError):
            while piece := bytearray(source.recv(1 << 16)):
                flip = (self.flip_request if request else self.flip) - at
                if self.hits == 0 and 0 <= flip < len(piece):
                    piece[flip] ^= 0x10
                    self.hits += 1
                if not request and self.hits == 0 and 0 <= self.cut - at < len(piece):
                    self.hits += 1
                    sink.sendall(piece[: self.cut - at])
                    break
                sink.sendall(piece)
                at += len(piece)
                if not request:
                    self.said += len(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
