"""One end of a pair: the child process that holds a torch.distributed group of two. Only here is torch imported.

`python -m weightsync.transports.pair`, with a SOCK_SEQPACKET socket as its standard input, on which the process that
started it gives orders, one JSON object a packet, each of which is answered by one:

    at start                                                       {"backends": ["ucc", "gloo"]}
    {"order": "host", "address", "token", "backend", "join_s"}     {"port": 1234}, then {"joined": true}
    {"order": "join", "address", "port", "local", "token", ...}    {"joined": true}
    {"order": "send", "start", "nbytes"} and a file                {"moved": 4194304}
    {"order": "receive", "nbytes"}, and a file of scratch memory   {"moved": 4194304}
    whatever fails                                                 {"failed": "why"}, and the process ends

torch cannot abort a collective of every backend: a wait that does not end is ended by whoever started this process,
which kills it. The process ends by itself when that one has closed the socket.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import queue
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from headrace.policy.backends import usable_backends

MAX_PACKET = 4096
_FAULTS = (RuntimeError, AssertionError, ValueError, TypeError, OSError, ImportError, KeyError)
"""What torch raises for a backend it lacks, a peer that is gone, a time that ran out; and a plugin that fails."""
_SIOCGIFADDR = 0x8915

_Order = tuple[dict[str, Any], int | None]
"""With the file that came with it."""


class End:
    """One of the two ranks."""

    def __init__(self) -> None:
        """Raises ImportError without torch, or a plugin's own error."""
        # What it would say there comes as an answer as well, without a C++ stack.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        import torch
        import torch.distributed

        torch.set_num_threads(1)
        self._torch = torch
        self._dist: Any = torch.distributed
        self._backends = usable_backends()
        self._peer = 0
        self._device = "cpu"
        self._scratch = memoryview(b"")

    def backends(self) -> list[str]:
        """What this torch can use here, the best first."""
        return self._backends

    def follow(self, order: dict[str, Any], file: int | None) -> Iterator[dict[str, Any]]:
        """The answers. Raises what torch raises."""
        match order["order"]:
            case "host":
                yield from self._host(order)
            case "join":
                self._join(self._store(order, order["port"]), order, rank=1)
                yield {"joined": True}
            case "send":
                assert file is not None
                yield {"moved": self._send(file, order["start"], order["nbytes"])}
            case "receive":
                yield {"moved": self._receive(file, order["nbytes"])}

    def _host(self, order: dict[str, Any]) -> Iterator[dict[str, Any]]:
        family = socket.AF_INET6 if ":" in order["address"] else socket.AF_INET
        # torch itself would listen on all addresses of this host.
        listener = socket.create_server((order["address"], 0), family=family)
        port = listener.getsockname()[1]
        store = self._store(order, port, listener.detach())
        yield {"port": port}
        self._join(store, order, rank=0)
        yield {"joined": True}

    def _store(self, order: dict[str, Any], port: int, listener: int | None = None) -> Any:
        return self._dist.TCPStore(
            order["address"],
            port,
            is_master=listener is not None,
            timeout=timedelta(seconds=order["join_s"]),
            wait_for_workers=False,
            master_listen_fd=listener,
        )

    def _join(self, store: Any, order: dict[str, Any], rank: int) -> None:
        """Ends once a few bytes have gone both ways: some backends connect only then."""
        if name := interface_of(order["local"]):
            # Else a backend takes the address of this host's name, which on many hosts is a loopback one.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
        self._dist.init_process_group(
            order["backend"],
            # All keys of the group lie behind the token: who does not have it finds nobody there.
            store=self._dist.PrefixStore(order["token"], store),
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=order["join_s"]),
        )
        self._peer = 1 - rank
        self._device = "cuda" if order["backend"] == "nccl" else "cpu"
        first, second = (self._dist.send, self._dist.recv) if rank == 0 else (self._dist.recv, self._dist.send)
        for move, byte in ((first, 1), (second, 2)):
            hello = self._torch.full((64,), byte, dtype=self._torch.uint8, device=self._device)
            move(hello, self._peer)
            if not bool((hello == byte).all()):
                raise RuntimeError("what came from the other end is not what it sent")

    def _send(self, file: int, start: int, nbytes: int) -> int:
        """Of the file, as one tensor [nbytes]."""
        self._read(file, start, nbytes)
        self._dist.send(self._tensor(nbytes).to(self._device), self._peer)
        self._finish()
        return nbytes

    def _read(self, file: int, start: int, nbytes: int) -> None:
        """Into the scratch memory; closes the file."""
        try:
            if len(self._scratch) < nbytes:
                self._scratch = memoryview(mmap.mmap(-1, nbytes))
            got = os.preadv(file, [self._scratch[:nbytes]], start)
        finally:
            os.close(file)
        if got != nbytes:
            raise OSError(f"the segment gave {got} bytes of {nbytes}")

    def _receive(self, file: int | None, nbytes: int) -> int:
        """Into the scratch memory, from its beginning on, as one tensor [nbytes]."""
        if file is not None:
            self._scratch = memoryview(mmap.mmap(file, 0))
            os.close(file)
        there = self._tensor(nbytes)
        here = there if self._device == "cpu" else self._torch.empty_like(there, device=self._device)
        self._dist.recv(here, self._peer)
        self._finish()
        if here is not there:
            there.copy_(here)
        return nbytes

    def _tensor(self, nbytes: int) -> Any:
        return self._torch.frombuffer(self._scratch, dtype=self._torch.uint8, count=nbytes)

    def _finish(self) -> None:
        """Of what was begun on a GPU."""
        if self._device == "cuda":
            self._torch.cuda.synchronize()


def interface_of(address: str) -> str:
    """Name of the network interface with this IPv4 address; empty for any other address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                # It has none.
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""


def _listen(channel: socket.socket, orders: queue.SimpleQueue[_Order]) -> None:
    """In a thread, so that this process ends with the one that started it, whatever it waits for."""
    try:
        while True:
            data, files, _, _ = socket.recv_fds(channel, MAX_PACKET, 1)
            if not data:
                break
            orders.put((json.loads(data), files[0] if files else None))
    except ConnectionResetError:
        # It ended with an answer unread.
        pass
    finally:
        os._exit(0)


def main(make: Callable[[], End] = End) -> None:
    channel = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, orders), daemon=True).start()

    def say(answer: dict[str, Any]) -> None:
        channel.send(json.dumps(answer).encode())

    try:
        end = make()
        say({"backends": end.backends()})
        while True:
            for answer in end.follow(*orders.get()):
                say(answer)
    except _FAULTS as error:
        lines = str(error).splitlines() or [""]
        say({"failed": f"{lines[0]} ({type(error).__name__})"[: MAX_PACKET // 8]})
    # Not by way of the interpreter's end, where threads of a group may wait for the other end.
    os._exit(1)


if __name__ == "__main__":
    main()
