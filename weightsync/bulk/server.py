"""The bulk server: sends chunks of this host's segments to other hosts. One thread per connection.

Wait graph. Nobody in this process waits for it, except `close`.

    thread      waits for                                        at most
    accept      a connection                                     `close`
    connection  the handshake                                    HANDSHAKE_S
    connection  the next request                                 IDLE_S, PAIR_IDLE_S with a pair; its upload slot is
                                                                 free after `stall_s`
    connection  a chunk that is not ready yet                    `wait_s`, then it answers "not yet"
    connection  the receiver to take bytes                       `stall_s` without a byte taken, then it is dropped
    connection  a pair's process (`weightsync/bulk/pairs.py`)    START_S, JOIN_S; `stall_s` and more for a large chunk,
                                                                 then it is killed and the connection dropped

So a peer that is stopped or gone holds an upload slot for `stall_s`. `close` shuts all sockets down, which ends every
one of these waits.
"""

from __future__ import annotations

import logging
import socket
import threading

from headrace.errors import WeightError, WireError
from weightsync.arena import Arena
from weightsync.bulk.auth import Unproven, check_bind, handshake
from weightsync.bulk.deltas import DeltaCache
from weightsync.bulk.pairs import Hosting, PairBroken
from weightsync.bulk.shelf import Shelf
from weightsync.bulk.sockets import abort, format_address, shut_down
from weightsync.bulk.upload import Books, BulkStats, Upload
from weightsync.tracker import CHILDREN, Tracker

log = logging.getLogger(__name__)

ACCEPT_AGAIN_S = 0.1


class BulkServer:
    """Serves what lies in `arena` of one run."""

    def __init__(
        self,
        arena: Arena,
        run_id: str,
        secret: bytes,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str = "",
        upload_slots: int = 1,
        stall_s: float = 2.0,
        wait_s: float = 1.0,
        max_connections: int = 256,
        cache_bytes: int = 256 << 20,
        backends: tuple[str, ...] = (),
    ) -> None:
        """Listens, and serves from now on. `advertise` is the host that others reach it under, `host` by default;
        `cache_bytes` bounds the deltas that are kept for the next reader; `backends` are those that chunks may go by
        through pairs.

        Raises WeightError where it may not or cannot listen.
        """
        check_bind(host, secret)
        self.secret = secret
        """May be replaced: Redis makes another one when it has lost this."""
        self._run_id = run_id
        self._stall_s, self._wait_s = stall_s, wait_s
        self._max_connections = max_connections
        self._shelf = Shelf(arena, run_id)
        self._hosting = Hosting(backends, stall_s)
        # One more than what the tracker gives away at first, and as many as it lets a relay have.
        self._books = Books(Tracker(upload_slots), max(CHILDREN, upload_slots + 1), cache_bytes, self._hosting)
        self._open: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=max_connections)
        except OSError as error:
            raise WeightError(f"the weight service cannot listen on {host}:{port}: {error.strerror}") from error
        self.address = format_address(advertise or host, self._listener.getsockname()[1])
        self._acceptor = threading.Thread(target=self._accept, name="bulk-accept", daemon=True)
        self._acceptor.start()

    def stats(self) -> BulkStats:
        return self._books.stats

    @property
    def deltas(self) -> DeltaCache:
        """Those that are kept for the next reader."""
        return self._books.deltas

    @property
    def uploads(self) -> int:
        """Upload slots that are taken now."""
        return self._books.uploads

    @property
    def connections(self) -> int:
        """Open ones."""
        return len(self._open)

    def close(self) -> None:
        """End all threads. Idempotent."""
        self._closing.set()
        shut_down(self._listener)
        self._hosting.close()
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            threads = [*self._open.values()]
            for sock in self._open:
                shut_down(sock)
        for thread in threads:
            thread.join()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.wait(ACCEPT_AGAIN_S):
                    log.warning("the weight service cannot accept a connection: %s", error)
                continue
            self._books.count(connections=1)
            if not self._begin(sock):
                self._books.count(refused=1)
                abort(sock)

    def _begin(self, sock: socket.socket) -> bool:
        """Serve it in a thread of its own; False where there are too many."""
        thread = threading.Thread(target=self._serve, args=(sock,), name="bulk-send", daemon=True)
        with self._lock:
            if len(self._open) >= self._max_connections:
                return False
            try:
                thread.start()
            except RuntimeError as error:
                log.warning("the weight service cannot serve one more connection: %s", error)
                return False
            # The thread takes it out, for which it waits for the lock.
            self._open[sock] = thread
        return True

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._proven(sock):
                Upload(sock, self.address, self._shelf, self._books, self._closing, self._stall_s, self._wait_s).run()
        except WireError as error:
            self._books.count(invalid=1)
            log.info("the weight service dropped a connection: %s", error)
        except PairBroken as error:
            log.warning("the weight service ends a pair: %s", error)
        except WeightError as error:
            # What it was sending is not in this memory any more.
            self._books.count(gone=1)
            log.warning("the weight service ends a connection: %s", error)
        except TimeoutError:
            self._books.count(stalled=1)
        except OSError as error:
            # Whoever pulled asks somebody else.
            log.debug("a connection of the weight service ended: %s", error)
        finally:
            with self._lock:
                del self._open[sock]
            abort(sock)

    def _proven(self, sock: socket.socket) -> bool:
        try:
            handshake(sock, "server", self.secret, self._run_id)
        except (OSError, WireError) as error:
            self._books.count(refused=1)
            if isinstance(error, Unproven):
                log.warning("the weight service refused a connection: %s", error)
            return False
        return True
