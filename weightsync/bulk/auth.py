"""Who may ask for weights: both ends prove that they have the run's secret before any other byte.

Each end says hello (magic, schema, a nonce of its own). Then the client, and after it the server, sends its proof:
blake2b, keyed with the secret, over its role, both nonces and the run's id. A recorded proof is worth nothing, since
the other end's nonce is new; a reflected one is not either, since roles differ. All messages have a fixed size.

What follows on the connection is neither encrypted nor signed: the secret keeps out who has no business here, not
somebody who can change packets on the way.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from typing import Literal

from broker.messages import SCHEMA
from headrace.errors import WeightError, WireError
from weightsync.bulk.sockets import is_loopback, receive, send

HANDSHAKE_S = 2.0
"""Time for the whole of it."""
NONCE_BYTES = 32
PROOF_BYTES = 32
Role = Literal["client", "server"]

_MAGIC = b"headrace"
_HELLO = struct.Struct(f"<8sI{NONCE_BYTES}s")
HELLO_BYTES = _HELLO.size


class Unproven(WireError):
    """The other end has not shown that it has this run's secret."""


def check_bind(host: str, secret: bytes) -> None:
    """Raises WeightError where a server would be open to strangers."""
    if not secret and not is_loopback(host):
        raise WeightError(
            f"the weight service cannot listen on {host!r}: it reaches beyond loopback, and the run has no secret; "
            "use 127.0.0.1"
        )


def handshake(sock: socket.socket, role: Role, secret: bytes, run_id: str, seconds: float = HANDSHAKE_S) -> None:
    """Of either end. Raises OSError, WireError for another program or release, Unproven."""
    deadline = time.monotonic() + seconds
    mine = secrets.token_bytes(NONCE_BYTES)
    send(sock, _HELLO.pack(_MAGIC, SCHEMA, mine), seconds)
    theirs = _nonce(receive(sock, _HELLO.size, deadline))
    nonces = mine + theirs if role == "client" else theirs + mine
    if role == "client":
        send(sock, proof("client", nonces, secret, run_id), seconds)
    other: Role = "server" if role == "client" else "client"
    expected = proof(other, nonces, secret, run_id)
    if not hmac.compare_digest(receive(sock, PROOF_BYTES, deadline), expected):
        raise Unproven(f"the {other} does not have the secret of run {run_id}")
    if role == "server":
        send(sock, proof("server", nonces, secret, run_id), seconds)


def proof(role: Role, nonces: bytes, secret: bytes, run_id: str) -> bytes:
    """`nonces`: the client's, then the server's."""
    text = role.encode() + nonces + run_id.encode()
    return hashlib.blake2b(text, digest_size=PROOF_BYTES, key=secret, person=b"headrace-bulk").digest()


def _nonce(hello: bytes) -> bytes:
    magic, schema, nonce = _HELLO.unpack(hello)
    if magic != _MAGIC:
        raise WireError("the other end is no weight service")
    if schema != SCHEMA:
        raise WireError(f"the other end speaks schema {schema}, this process {SCHEMA}; run one release everywhere")
    return bytes(nonce)
