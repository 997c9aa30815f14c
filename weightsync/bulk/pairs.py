"""The ends of pairs in this process: each is a child process (`weightsync/transports/pair.py`), with a bound on every
wait for it. What does not answer in time is killed: no collective hangs a service."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
from typing import Any

from headrace.errors import WeightError
from weightsync.bulk.frames import Offer
from weightsync.bulk.sockets import local_ip

BACKENDS = ("nccl", "ucc", "gloo")
"""The best first."""
START_S = 60.0
"""For a child to import torch; some seconds where the machine is idle."""
JOIN_S = 30.0
"""For both ends of a pair to find each other."""
MAX_PAIRS = 8
"""Of a server: each is a process with torch in it."""
SLOWEST = 4 << 20
"""Bytes per second that a collective may be slow."""
KILL_S = 2.0
_MAX_PACKET = 4096
_PROGRAM = "weightsync.transports.pair"


class PairBroken(ConnectionError):
    """A pair, or what should have become one, is of no use any more; why."""


class Child:
    """One end's process. For one thread at a time, but for `kill`."""

    def __init__(self, program: str = _PROGRAM) -> None:
        """`program` is a module. Raises PairBroken when no process can be started."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # A session of its own: it ends with this process, not by a signal that its terminal sends to all.
            self._process = subprocess.Popen(
                [sys.executable, "-m", program],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self._socket.close()
            raise PairBroken(f"no process can be started for it: {error}") from error
        finally:
            theirs.close()
        self.beside: socket.socket | None = None
        """The connection to where the other end is: when that closes it, there is nothing to wait for."""
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def backends(self, seconds: float = START_S) -> tuple[str, ...]:
        """What it can use, the best first. Once, before any order. Raises PairBroken."""
        return tuple(self.answer(seconds)["backends"])

    def tell(self, order: str, file: int | None = None, **fields: Any) -> None:
        """Raises PairBroken."""
        data = json.dumps({"order": order, **fields}).encode()
        try:
            socket.send_fds(self._socket, [data], [] if file is None else [file], socket.MSG_NOSIGNAL)
        except OSError as error:
            # What it said last is why.
            self.answer(0.0)
            raise self._broken("its process has ended") from error

    def answer(self, seconds: float) -> dict[str, Any]:
        """Raises PairBroken, with the child killed, also when nothing came within so many seconds."""
        try:
            if not self._comes(seconds):
                raise self._broken(f"nothing moved for {seconds:.3g} s")
            if not self._comes(0.0, beside=False):
                raise self._broken("the other end has given it up")
            data = self._socket.recv(_MAX_PACKET)
        except (OSError, ValueError) as error:
            raise error if isinstance(error, PairBroken) else self._broken("its process was killed") from error
        if not data:
            raise self._broken("its process has ended")
        answer: dict[str, Any] = json.loads(data)
        if "failed" in answer:
            raise self._broken(answer["failed"])
        return answer

    def kill(self) -> None:
        """Whoever waits for it gets PairBroken at once. Any thread; idempotent."""
        with self._lock:
            self._process.kill()
            # A process that waits in a driver does not even end by that.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_S)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """No other thread uses it."""
        self.kill()
        self._socket.close()

    def _comes(self, seconds: float, *, beside: bool = True) -> bool:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        if beside and self.beside is not None:
            poller.register(self.beside, select.POLLRDHUP)
        return bool(poller.poll(seconds * 1000))

    def _broken(self, why: str) -> PairBroken:
        self.kill()
        return PairBroken(why)


def usable_backends(wanted: str) -> tuple[str, ...]:
    """What this host offers for `weights.collective_backend`, the best first. Takes the time to import torch.

    Raises WeightError where it has nothing of what is wanted, with the reason and the way out.
    """
    child = None
    try:
        child = Child()
        found = child.backends()
    except PairBroken as error:
        raise WeightError(
            f'weights.transport = "collective" needs torch, which does not load here: {error}; install it, or set '
            'weights.transport = "auto"'
        ) from error
    finally:
        if child is not None:
            child.close()
    offered = tuple(name for name in BACKENDS if name in found and wanted in ("auto", name))
    if not offered:
        raise WeightError(f'weights.collective_backend = "{wanted}" cannot be used here: {_LACKING.get(wanted, "")}')
    return offered


_LACKING = {
    "auto": "this torch has no backend for it at all; set weights.transport = \"auto\"",
    "ucc": (
        "this torch is built without UCC, as all of pip's are, and torch-ucc is not on PyPI; use a build with "
        "USE_UCC=1 (containers of NVIDIA may have one), name a module that registers such a backend in "
        "HEADRACE_TORCH_BACKENDS, "
        'or set weights.collective_backend or weights.transport to "auto"'
    ),
    "nccl": 'this torch sees no GPU or has no NCCL; set weights.collective_backend or weights.transport to "auto"',
    "gloo": 'this torch is built without gloo; set weights.collective_backend or weights.transport to "auto"',
}  # fmt: skip


def agreed(offered: tuple[str, ...], wanted: tuple[str, ...]) -> str | None:
    """The best that both ends have."""
    return next((name for name in BACKENDS if name in offered and name in wanted), None)


class SendingEnd:
    """The server's end of one pair. For one thread, but for `close`."""

    def __init__(self, child: Child, stall_s: float) -> None:
        self._child = child
        self._stall_s = stall_s

    def host(self, backend: str, sock: socket.socket) -> Offer:
        """For the other end of this connection. Raises PairBroken."""
        token, address = secrets.token_hex(16), local_ip(sock)
        self._child.beside = sock
        self._child.backends()
        self._child.tell("host", address=address, local=address, token=token, backend=backend, join_s=JOIN_S)
        return Offer(self._child.answer(JOIN_S)["port"], token, backend)

    def joined(self) -> None:
        """Wait for the other end. Raises PairBroken."""
        self._child.answer(2 * JOIN_S)

    def send(self, file: int, start: int, nbytes: int) -> None:
        """These bytes of a file. Raises PairBroken."""
        self._child.tell("send", file, start=start, nbytes=nbytes)
        self._child.answer(self._stall_s + nbytes / SLOWEST)

    @property
    def pid(self) -> int:
        return self._child.pid

    def kill(self) -> None:
        self._child.kill()

    def close(self) -> None:
        self._child.close()


class ReceivingEnd:
    """The asking end of one pair. For one thread, but for `kill`."""

    def __init__(self, stall_s: float) -> None:
        """Begins to start its process. Raises PairBroken."""
        self._child = Child()
        self._stall_s = stall_s
        self._scratch = -1
        self._size = 0

    @property
    def alive(self) -> bool:
        return self._child.alive

    @property
    def pid(self) -> int:
        return self._child.pid

    def join(self, offer: Offer, sock: socket.socket) -> None:
        """The other end of this connection. Raises PairBroken."""
        self._child.beside = sock
        self._child.backends()
        self._child.tell(
            "join", address=sock.getpeername()[0], port=offer.port, local=local_ip(sock), token=offer.token,
            backend=offer.backend, join_s=JOIN_S,
        )  # fmt: skip
        self._child.answer(2 * JOIN_S)

    def receive(self, views: list[memoryview], nbytes: int) -> None:
        """What the other end sends next. Raises PairBroken."""
        file = None
        if self._size < nbytes:
            self._renew(nbytes)
            file = self._scratch
        self._child.tell("receive", file, nbytes=nbytes)
        self._child.answer(self._stall_s + nbytes / SLOWEST)
        start = 0
        for view in views:
            start += os.preadv(self._scratch, [view], start)

    def kill(self) -> None:
        self._child.kill()

    def close(self) -> None:
        """No other thread uses it."""
        self._child.close()
        if self._scratch >= 0:
            os.close(self._scratch)
            self._scratch = -1

    def _renew(self, nbytes: int) -> None:
        """Memory that both processes have."""
        if self._scratch >= 0:
            os.close(self._scratch)
        self._scratch, self._size = os.memfd_create("headrace-pair", os.MFD_CLOEXEC), nbytes
        os.ftruncate(self._scratch, nbytes)


class Hosting:
    """All pairs of a server. Any thread."""

    def __init__(self, backends: tuple[str, ...], stall_s: float) -> None:
        """Without backends it refuses all."""
        self._backends = backends
        self._stall_s = stall_s
        self._ends: set[SendingEnd] = set()
        self._closed = False
        self._lock = threading.Lock()

    def begin(self, wanted: tuple[str, ...]) -> tuple[SendingEnd, str]:
        """An end that is about to start, and the backend. Raises PairBroken with why there is none."""
        if not self._backends:
            raise PairBroken("weights.transport is not collective there")
        backend = agreed(self._backends, wanted)
        if backend is None:
            raise PairBroken(f"it offers {', '.join(self._backends)}, this end {', '.join(wanted) or 'nothing'}")
        with self._lock:
            if self._closed or len(self._ends) >= MAX_PAIRS:
                raise PairBroken(f"it has {len(self._ends)} pairs already")
            end = SendingEnd(Child(), self._stall_s)
            self._ends.add(end)
        return end, backend

    def end(self, end: SendingEnd) -> None:
        with self._lock:
            self._ends.discard(end)
        end.close()

    def close(self) -> None:
        """Who waits for one of them does so no longer."""
        with self._lock:
            self._closed = True
            for end in self._ends:
                end.kill()
