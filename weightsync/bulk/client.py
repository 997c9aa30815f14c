"""The asking end of a connection to a bulk server. Blocking, for one thread; `cancel` is for another."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Sequence

import xxhash

from headrace.errors import WireError
from weightsync.bulk.auth import handshake
from weightsync.bulk.frames import (
    HEADER_BYTES,
    MAX_REQUEST_BYTES,
    Header,
    Offer,
    Pair,
    Request,
    Status,
    decode_header,
    decode_offer,
    decode_parents,
    decode_refusal,
    encode_request,
)
from weightsync.bulk.sockets import abort, parse_address, receive, send, shut_down, wait_for
from weightsync.digests import Pace

READ_BYTES = 1 << 20
"""Read and digested at once, while it is warm in the cache."""


class Connection:
    """Proven on both sides, once it is open.

    Every method raises OSError (TimeoutError after `stall_s` without a byte) and WireError.
    """

    def __init__(self, address: str, *, connect_s: float, stall_s: float) -> None:
        self.address = address
        self._connect_s = connect_s
        self._stall_s = stall_s
        self._sock = socket.socket()

    def open(self, secret: bytes, run_id: str) -> None:
        """Raises WeightError for what is no address, too."""
        host, port = parse_address(self.address)
        error: OSError = ConnectionError(f"{host} has no address")
        for family, kind, number, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            self._sock.close()
            # Known before it is connected, so that `cancel` ends that as well.
            self._sock = socket.socket(family, kind, number)
            self._sock.settimeout(self._connect_s)
            try:
                self._sock.connect(where)
            except OSError as refused:
                error = refused
                continue
            self._sock.setblocking(False)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handshake(self._sock, "client", secret, run_id, self._connect_s)
            return
        raise error

    @property
    def fresh(self) -> bool:
        """Whether it can be asked something: open, and nothing left in it."""
        return not self.comes(0.0)

    def comes(self, seconds: float) -> bool:
        """Whether something comes, or the end, within so many seconds."""
        return wait_for(self._sock, select.POLLIN, seconds)

    def ask(self, request: Request) -> None:
        send(self._sock, encode_request(request), self._stall_s)

    def header(self) -> Header:
        """Of the next reply."""
        return decode_header(receive(self._sock, HEADER_BYTES, time.monotonic() + self._stall_s))

    def parents(self) -> list[str]:
        """The reply to an `Ask`."""
        header = self.header()
        if header.status is not Status.PARENTS or header.wire_nbytes > MAX_REQUEST_BYTES:
            raise WireError(f"a question for parents is answered {header.status.name}")
        return decode_parents(receive(self._sock, header.wire_nbytes, time.monotonic() + self._stall_s))

    def noted(self) -> None:
        """The reply to a `Done`."""
        header = self.header()
        if header.status is not Status.NOTED:
            raise WireError(f"what was said is answered {header.status.name}")

    def pair(self, backends: tuple[str, ...], seconds: float) -> Offer | str:
        """Ask for a pair with one of these backends; or why there is none. Waits so long for the reply."""
        self.ask(Pair(backends))
        deadline = time.monotonic() + seconds
        header = decode_header(receive(self._sock, HEADER_BYTES, deadline))
        if header.status not in (Status.PAIR, Status.REFUSED) or header.wire_nbytes > MAX_REQUEST_BYTES:
            raise WireError(f"a question for a pair is answered {header.status.name}")
        body = receive(self._sock, header.wire_nbytes, deadline)
        return decode_offer(body) if header.status is Status.PAIR else decode_refusal(body)

    @property
    def sock(self) -> socket.socket:
        """To look at, not to read from."""
        return self._sock

    def read(self, views: Sequence[memoryview], pace: Pace) -> bytes:
        """Fill the views with the bytes that come next; returns their digest."""
        digest = xxhash.xxh3_128()
        for view in views:
            at = 0
            while at < len(view):
                pace.start()
                got = self._receive(view[at : at + READ_BYTES])
                digest.update(view[at : at + got])
                at += got
                pace.rest()
        return digest.digest()

    def cancel(self) -> None:
        """Whatever another thread waits for here fails at once."""
        shut_down(self._sock)

    def close(self) -> None:
        abort(self._sock)

    def _receive(self, view: memoryview) -> int:
        while True:
            try:
                got = self._sock.recv_into(view)
            except BlockingIOError:
                if not wait_for(self._sock, select.POLLIN, self._stall_s):
                    raise TimeoutError(f"nothing came for {self._stall_s:g} s") from None
                continue
            if got == 0:
                raise ConnectionError("the connection was closed in the middle of a chunk")
            return got


class Cancellation:
    """Ends what a thread does with a connection, from another thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._connection: Connection | None = None

    @property
    def asked(self) -> bool:
        return self._event.is_set()

    def use(self, connection: Connection) -> Connection:
        """The thread is about to wait for this one."""
        self._connection = connection
        if self.asked:
            connection.cancel()
        return connection

    def rest(self, seconds: float) -> None:
        self._event.wait(seconds)

    def ask(self) -> None:
        self._event.set()
        if self._connection is not None:
            self._connection.cancel()

    def clear(self) -> None:
        self._event.clear()
        self._connection = None
