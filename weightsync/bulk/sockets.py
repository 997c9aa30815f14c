"""Blocking sockets with a bound on every wait."""

from __future__ import annotations

import ipaddress
import select
import socket
import struct
import time

from headrace.errors import WeightError

SEND_BYTES = 1 << 20
"""Handed to the kernel at once."""
_ABORT = struct.pack("ii", 1, 0)


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port". Raises WeightError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise WeightError(f"{text[:256]!r} is no address; write host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_ip(sock: socket.socket) -> str:
    """This end's address, without what IPv6 puts before one of IPv4."""
    return str(sock.getsockname()[0]).removeprefix("::ffff:")


def is_loopback(host: str) -> bool:
    """Of a name other than localhost nobody knows where it leads: no."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def wait_for(sock: socket.socket, event: int, seconds: float) -> bool:
    """Whether the socket is readable (select.POLLIN) or writable (select.POLLOUT) within so many seconds."""
    poller = select.poll()
    poller.register(sock, event)
    return bool(poller.poll(max(0.0, seconds) * 1000))


def receive(sock: socket.socket, nbytes: int, deadline: float) -> bytes:
    """Exactly so many bytes, until `deadline` on the monotonic clock. Raises OSError."""
    data = bytearray(nbytes)
    view = memoryview(data)
    while view:
        if not wait_for(sock, select.POLLIN, deadline - time.monotonic()):
            raise TimeoutError("the other end says nothing")
        try:
            got = sock.recv_into(view, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            continue
        if got == 0:
            raise ConnectionError("the other end closed the connection")
        view = view[got:]
    return bytes(data)


def send(sock: socket.socket, data: bytes | memoryview, stall_s: float, *, more: bool = False) -> None:
    """All of it; `more` follows at once. Raises OSError, TimeoutError once nothing was taken for `stall_s`."""
    flags = socket.MSG_DONTWAIT | (socket.MSG_MORE if more else 0)
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view[:SEND_BYTES], flags) :]
        except BlockingIOError:
            _wait_writable(sock, stall_s)


def shut_down(sock: socket.socket) -> None:
    """Wake the thread that waits on it: what it waits for fails at once."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        # It was not connected any more.
        return


def abort(sock: socket.socket) -> None:
    """Close it, and let what was not sent yet go."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
    sock.close()


def _wait_writable(sock: socket.socket, stall_s: float) -> None:
    if not wait_for(sock, select.POLLOUT, stall_s):
        raise TimeoutError(f"the other end took nothing for {stall_s:g} s")
