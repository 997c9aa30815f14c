"""One connection to the bulk server, once the other end has proven itself: requests come, replies go."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from dataclasses import dataclass, replace

from headrace.errors import WeightError, WireError
from weightsync.bulk.deltas import Delta, DeltaCache, Encoder, decode_runs
from weightsync.bulk.frames import (
    LENGTH,
    MAX_REQUEST_BYTES,
    Ask,
    Codec,
    Done,
    Get,
    Header,
    Pair,
    Request,
    Status,
    decode_request,
    encode_header,
    encode_offer,
    encode_parents,
    encode_refusal,
)
from weightsync.bulk.pairs import Hosting, PairBroken, SendingEnd
from weightsync.bulk.shelf import Held, Shelf
from weightsync.bulk.sockets import receive, send, wait_for
from weightsync.tracker import Tracker

log = logging.getLogger(__name__)

IDLE_S = 5.0
PAIR_IDLE_S = 600.0
"""As `IDLE_S`, for a connection with a pair: that takes seconds to make again."""
REQUEST_S = 2.0
"""For the rest of a request once its first byte came."""
MAX_ENCODE_US = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class BulkStats:
    """Counters since start; a reader takes differences."""

    sent_bytes: int = 0
    """Of chunks, as they go over the wire."""
    chunks: int = 0
    delta_chunks: int = 0
    """Of these, as deltas."""
    pair_chunks: int = 0
    """Of these, through a pair."""
    encoded: int = 0
    """Deltas that were made; the others were there already."""
    connections: int = 0
    """Refused ones included."""
    refused: int = 0
    """Too many at once, or who could not prove itself."""
    invalid: int = 0
    """Connections that ended with a request that is not valid."""
    stalled: int = 0
    """Receivers that were dropped since they took nothing."""
    busy: int = 0
    gone: int = 0


class Books:
    """What all connections of a server share. Any thread."""

    def __init__(self, tracker: Tracker, max_uploads: int, cache_bytes: int, hosting: Hosting) -> None:
        self.stats = BulkStats()
        self.hosting = hosting
        self.deltas = DeltaCache(cache_bytes)
        self.uploads = 0
        self._max_uploads = max_uploads
        self._tracker = tracker
        self._lock = threading.Lock()

    def count(self, **more: int) -> None:
        with self._lock:
            self.stats = replace(
                self.stats, **{name: getattr(self.stats, name) + count for name, count in more.items()}
            )

    def take_slot(self) -> bool:
        with self._lock:
            free = self.uploads < self._max_uploads
            self.uploads += free
            return free

    def leave_slot(self) -> None:
        with self._lock:
            self.uploads -= 1

    def parents(self, ask: Ask, origin: str) -> list[str]:
        with self._lock:
            return self._tracker.ask(
                (ask.version, ask.part), ask.name, ask.address, time.monotonic(),
                origin=origin, parent=ask.parent, failed=ask.failed,
            )  # fmt: skip

    def done(self, done: Done) -> None:
        with self._lock:
            self._tracker.done((done.version, done.part), done.name, time.monotonic(), holds=done.holds)


class Upload:
    """The server's end of a connection. It holds an upload slot while it is asked for chunks."""

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        shelf: Shelf,
        books: Books,
        closing: threading.Event,
        stall_s: float,
        wait_s: float,
    ) -> None:
        self._sock = sock
        self._address = address
        self._shelf = shelf
        self._books = books
        self._closing = closing
        self._stall_s = stall_s
        self._wait_s = wait_s
        self._has_slot = False
        self._pair: SendingEnd | None = None

    def run(self) -> None:
        """Until the other end closes, is idle, or the server closes. Raises OSError, WireError."""
        try:
            while not self._closing.is_set() and (request := self._request()):
                self._answer(request)
        finally:
            self._leave_slot()
            if self._pair is not None:
                self._books.hosting.end(self._pair)

    def _request(self) -> Request | None:
        if not wait_for(self._sock, select.POLLIN, self._stall_s):
            self._leave_slot()
            if not wait_for(self._sock, select.POLLIN, PAIR_IDLE_S if self._pair else IDLE_S):
                return None
        if not self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            return None
        deadline = time.monotonic() + REQUEST_S
        (nbytes,) = LENGTH.unpack(receive(self._sock, LENGTH.size, deadline))
        if nbytes > MAX_REQUEST_BYTES:
            raise WireError(f"a request of {nbytes} bytes is over the bound of {MAX_REQUEST_BYTES}")
        return decode_request(receive(self._sock, nbytes, deadline))

    def _answer(self, request: Request) -> None:
        match request:
            case Get():
                self._get(request)
            case Ask():
                body = encode_parents(self._books.parents(request, self._address))
                self._reply(Header(Status.PARENTS, wire_nbytes=len(body)), body)
            case Done():
                self._books.done(request)
                self._reply(Header(Status.NOTED))
            case Pair():
                self._become_pair(request)

    def _become_pair(self, request: Pair) -> None:
        """Raises PairBroken where nothing comes of it."""
        if self._pair is not None:
            raise WireError("a connection is to become a pair twice")
        try:
            self._pair, backend = self._books.hosting.begin(request.backends)
            body = encode_offer(self._pair.host(backend, self._sock))
        except PairBroken as error:
            body = encode_refusal(str(error))
            self._reply(Header(Status.REFUSED, wire_nbytes=len(body)), body)
            raise
        self._reply(Header(Status.PAIR, wire_nbytes=len(body)), body)
        self._pair.joined()
        log.info("weights go to %s by collective, backend %s", self._sock.getpeername()[0], backend)

    def _get(self, get: Get) -> None:
        held = self._shelf.find(get.version, get.part, get.nbytes, get.chunk_bytes)
        if held is None:
            self._books.count(gone=1)
            self._reply(Header(Status.GONE))
            return
        try:
            if not self._take_slot():
                self._books.count(busy=1)
                self._reply(Header(Status.BUSY))
            elif (encoder := self._encoder(get, held)) is None:
                self._send_chunks(get, held, None)
            else:
                with contextlib.closing(encoder):
                    self._send_chunks(get, held, encoder)
        finally:
            held.close()

    def _encoder(self, get: Get, held: Held) -> Encoder | None:
        """Where a delta is wanted and its base is here, too. Raises WireError for runs that are none."""
        if get.change is None:
            return None
        marks = decode_runs(get.change.runs)
        base = self._shelf.whole(get.change.base, get.part, get.nbytes, get.chunk_bytes)
        return None if base is None else Encoder(get, get.change, marks, base, held, self._books.deltas)

    def _send_chunks(self, get: Get, held: Held, encoder: Encoder | None) -> None:
        chunk = get.first
        while chunk < get.end and not self._closing.is_set():
            ready = min(get.end, held.grown(chunk, self._wait_s, self._ended))
            if ready <= chunk:
                self._reply(Header(Status.GONE if held.abandoned else Status.NOT_YET))
                return
            for digest in held.segment.digests(chunk, ready):
                start = chunk * get.chunk_bytes
                nbytes = min(get.chunk_bytes, get.nbytes - start)
                delta = self._delta(encoder, chunk, nbytes)
                if encoder is None or delta is None:
                    self._send_full(held, start, Header(Status.CHUNK, Codec.RAW, chunk, nbytes, nbytes, digest))
                else:
                    codec, us = encoder.codec, min(MAX_ENCODE_US, int(delta.encode_s * 1e6))
                    header = Header(Status.CHUNK, codec, chunk, len(delta.wire), nbytes, digest, delta.digest, us)
                    self._send_delta(header, delta.wire)
                chunk += 1

    def _delta(self, encoder: Encoder | None, chunk: int, nbytes: int) -> Delta | None:
        """Where it is shorter than the chunk."""
        if encoder is None:
            return None
        try:
            delta = encoder.encode(chunk)
        except WeightError as error:
            # What the asker says of dtypes does not fit, or the base ended.
            log.info("chunk %d goes out in full: %s", chunk, error)
            return None
        self._books.count(encoded=delta.encode_s > 0)
        return delta if len(delta.wire) < nbytes else None

    def _send_full(self, held: Held, start: int, header: Header) -> None:
        self._books.count(chunks=1, sent_bytes=header.wire_nbytes)
        if self._pair is not None:
            self._books.count(pair_chunks=1)
            self._reply(header)
            self._pair.send(held.segment.fileno(), start, header.nbytes)
            return
        send(self._sock, encode_header(header), self._stall_s, more=True)
        # Mapped and sent, which on one machine is twice as fast as sendfile: both ends then copy at the same time.
        with held.view(start, start + header.nbytes) as view:
            send(self._sock, view, self._stall_s)

    def _send_delta(self, header: Header, wire: bytes) -> None:
        self._books.count(chunks=1, delta_chunks=1, sent_bytes=header.wire_nbytes)
        send(self._sock, encode_header(header), self._stall_s, more=True)
        send(self._sock, wire, self._stall_s)

    def _ended(self, seconds: float) -> bool:
        """Whether either end closes the connection within so many seconds."""
        return wait_for(self._sock, select.POLLRDHUP, seconds)

    def _reply(self, header: Header, body: bytes = b"") -> None:
        send(self._sock, encode_header(header) + body, self._stall_s)

    def _take_slot(self) -> bool:
        self._has_slot = self._has_slot or self._books.take_slot()
        return self._has_slot

    def _leave_slot(self) -> None:
        if self._has_slot:
            self._has_slot = False
            self._books.leave_slot()
