"""Nobody is served, and nobody is believed, without the run's secret."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable

import pytest

from broker.messages import SCHEMA
from headrace.errors import WeightError, WireError
from weightsync.bulk.auth import HELLO_BYTES, NONCE_BYTES, PROOF_BYTES, Unproven, check_bind, handshake, proof

SECRET = b"s" * 32
RUN = "run-1"


def both(client: Callable[[socket.socket], None], server: Callable[[socket.socket], None]) -> list[Exception | None]:
    """What the two ends of a connection end with."""
    ends = socket.socketpair()
    outcome: list[Exception | None] = [None, None]

    def play(number: int, part: Callable[[socket.socket], None]) -> None:
        ends[number].setblocking(False)
        try:
            part(ends[number])
        except (OSError, WireError) as error:
            outcome[number] = error
        finally:
            ends[number].close()

    threads = [threading.Thread(target=play, args=pair) for pair in enumerate((client, server))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome


def client(secret: bytes = SECRET, run: str = RUN) -> Callable[[socket.socket], None]:
    return lambda sock: handshake(sock, "client", secret, run, 30.0)


def server(secret: bytes = SECRET, run: str = RUN, seconds: float = 30.0) -> Callable[[socket.socket], None]:
    return lambda sock: handshake(sock, "server", secret, run, seconds)


def say(*pieces: bytes) -> Callable[[socket.socket], None]:
    """A client that says these, whatever it hears, and waits for the other end to close."""

    def part(sock: socket.socket) -> None:
        sock.setblocking(True)
        for piece in pieces:
            sock.sendall(piece)
        while sock.recv(4096):
            pass

    return part


@pytest.mark.parametrize("secret", [SECRET, b""])
def test_two_ends_with_one_secret_and_run_accept_each_other(secret: bytes) -> None:
    assert both(client(secret), server(secret)) == [None, None]


def test_a_client_with_another_secret_is_refused_and_learns_no_proof() -> None:
    there, here = both(client(b"x" * 32), server())
    assert isinstance(here, Unproven)
    assert isinstance(there, ConnectionError), "the server closed without a proof of its own"


def test_a_client_of_another_run_is_refused() -> None:
    there, here = both(client(run="run-2"), server())
    assert isinstance(here, Unproven)
    assert isinstance(there, ConnectionError)


def test_a_server_that_cannot_prove_itself_is_not_believed() -> None:
    def pretend(sock: socket.socket) -> None:
        sock.setblocking(True)
        sock.sendall(struct.pack(f"<8sI{NONCE_BYTES}s", b"headrace", SCHEMA, b"n" * NONCE_BYTES))
        sock.recv(HELLO_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
        sock.sendall(b"p" * PROOF_BYTES)

    there, _ = both(client(), pretend)
    assert isinstance(there, Unproven)


def test_a_proof_that_is_sent_back_is_not_believed() -> None:
    def mirror(sock: socket.socket) -> None:
        """Sends everything back: the client's own nonce, then its own proof."""
        sock.setblocking(True)
        while piece := sock.recv(4096):
            sock.sendall(piece)

    there, _ = both(client(), mirror)
    assert isinstance(there, Unproven)


def test_a_recorded_client_is_refused_the_second_time() -> None:
    recorded: list[bytes] = []

    def record(sock: socket.socket) -> None:
        ends = socket.socketpair()
        relay = threading.Thread(target=lambda: client()(nonblocking(ends[0])))
        relay.start()
        sock.setblocking(True)
        for nbytes, source, sink in ((HELLO_BYTES, ends[1], sock), (HELLO_BYTES, sock, ends[1]),
                                     (PROOF_BYTES, ends[1], sock), (PROOF_BYTES, sock, ends[1])):  # fmt: skip
            piece = source.recv(nbytes, socket.MSG_WAITALL)
            sink.sendall(piece)
            if source is ends[1]:
                recorded.append(piece)
        relay.join()
        for end in ends:
            end.close()

    assert both(record, server()) == [None, None]
    _, here = both(say(*recorded), server())
    assert isinstance(here, Unproven)


def nonblocking(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    return sock


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 100, bytes(HELLO_BYTES), b"\xff" * (1 << 20)]
)
def test_garbage_is_refused_at_its_first_bytes(said: bytes) -> None:
    _, here = both(say(said), server())
    assert isinstance(here, WireError)
    assert "no weight service" in str(here)


def test_another_release_is_named() -> None:
    hello = struct.pack(f"<8sI{NONCE_BYTES}s", b"headrace", SCHEMA + 1, b"n" * NONCE_BYTES)
    _, here = both(say(hello), server())
    assert f"schema {SCHEMA + 1}" in str(here)


def test_who_says_nothing_or_half_is_given_up() -> None:
    for said in (b"", b"headrace"):
        _, here = both(say(said), server(seconds=0.05))
        assert isinstance(here, TimeoutError)


def test_a_proof_depends_on_role_nonces_secret_and_run() -> None:
    nonces = bytes(range(64))
    proofs = {
        proof("client", nonces, SECRET, RUN),
        proof("server", nonces, SECRET, RUN),
        proof("client", nonces[::-1], SECRET, RUN),
        proof("client", nonces, b"", RUN),
        proof("client", nonces, SECRET, "run-2"),
    }
    assert len(proofs) == 5


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example"])
def test_no_server_beyond_loopback_without_a_secret(host: str) -> None:
    with pytest.raises(WeightError, match="beyond loopback"):
        check_bind(host, b"")
    check_bind(host, SECRET)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_on_loopback_a_server_needs_no_secret(host: str) -> None:
    check_bind(host, b"")
