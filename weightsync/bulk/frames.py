"""What is said on a connection once both ends have proven themselves.

A request is a msgpack list behind its length (u32). Each reply starts with a header of fixed size:

    status u8, codec u8, 0 u16, chunk u32, bytes on the wire u32, bytes of the chunk u32, microseconds of encoding u32,
    digest of the chunk's new bytes (16), digest of the bytes on the wire where they are others (16),
    digest of all this (8)

A request for chunks is answered by one reply per chunk, in order, until the last one or a reply that is no chunk. On
a connection that has become a pair, the bytes of a chunk are not behind its header: they go from process to process.
What a header says is compared with what was asked before a byte is allocated or read.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Any

import msgpack
import xxhash

from headrace.errors import WireError
from headrace.version import PolicyVersion
from weightsync.manifest import ALIGNMENT, DIGEST_BYTES, MAX_CHUNK_BYTES, MAX_LAYOUT_BYTES, MAX_PARTS, MAX_TEXT

MAX_REQUEST_BYTES = 64 << 10
MAX_PARENTS = 3
MAX_FAILED = 16
MAX_BACKENDS = 8
LENGTH = struct.Struct("<I")

_HEADER = struct.Struct("<BBHIIII16s16s")
_CHECK_BYTES = 8
HEADER_BYTES = _HEADER.size + _CHECK_BYTES
_NO_DIGEST = bytes(DIGEST_BYTES)
_MAX_NUMBER = 1 << 62


class Status(enum.IntEnum):
    CHUNK = 1
    NOT_YET = 2
    """The version is not as far yet."""
    GONE = 3
    """This server does not have the version."""
    BUSY = 4
    """All upload slots are taken."""
    REFUSED = 5
    """A msgpack list of one text follows: why."""
    PARENTS = 6
    """A msgpack list of addresses follows."""
    NOTED = 7
    PAIR = 8
    """A msgpack list that is an `Offer` follows."""


class Codec(enum.IntEnum):
    RAW = 0
    SPARSE_ULP = 1
    SPARSE_ABS = 2

    @property
    def key(self) -> str:
        """Its name in `codecs.CODECS`."""
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True, slots=True)
class Change:
    """Chunks as the difference from a version that the asker has whole, where the server has it as well."""

    base: PolicyVersion
    codec: Codec
    runs: bytes
    """As `deltas.runs_of` says."""


@dataclass(frozen=True, slots=True)
class Get:
    """Send these chunks of a part."""

    version: PolicyVersion
    part: int
    nbytes: int
    """Of the part, as the asker's layout says."""
    chunk_bytes: int
    first: int
    end: int
    change: Change | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """Said to the host that published it: whom shall I ask for this part?"""

    version: PolicyVersion
    part: int
    name: str
    """Of who pulls."""
    address: str
    """Where others may have it from who pulls; empty where nobody can."""
    parent: str = ""
    """Whom it pulls from now; empty for nobody."""
    failed: tuple[str, ...] = ()
    """Who stalled, died, or did not have it."""


@dataclass(frozen=True, slots=True)
class Done:
    """Said to the host that published it: I pull this part no more."""

    version: PolicyVersion
    part: int
    name: str
    holds: bool
    """Whether it has all of it."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Send the chunks of this connection through a torch.distributed group of two, with one of these backends."""

    backends: tuple[str, ...]


Request = Get | Ask | Done | Pair


@dataclass(frozen=True, slots=True)
class Offer:
    """Where the other rank of a pair waits: on the host of the connection that it is told on."""

    port: int
    """Of its TCPStore."""
    token: str
    """Without it nobody is found there. For one pair."""
    backend: str


@dataclass(frozen=True, slots=True)
class Header:
    status: Status
    codec: Codec = Codec.RAW
    chunk: int = 0
    wire_nbytes: int = 0
    nbytes: int = 0
    digest: bytes = _NO_DIGEST
    wire_digest: bytes = _NO_DIGEST
    encode_us: int = 0
    """What it took to encode, where that was not done already."""


def encode_request(request: Request) -> bytes:
    """With its length before it."""
    match request:
        case Get(version, part, nbytes, chunk_bytes, first, end, change):
            how = [*change.base, int(change.codec), change.runs] if change else []
            row = ["get", *version, part, nbytes, chunk_bytes, first, end, how]
        case Ask(version, part, name, address, parent, failed):
            row = ["ask", *version, part, name, address, parent, [*failed]]
        case Done(version, part, name, holds):
            row = ["done", *version, part, name, holds]
        case Pair(backends):
            row = ["pair", [*backends]]
    body: bytes = msgpack.packb(row)
    return LENGTH.pack(len(body)) + body


def decode_request(body: bytes) -> Request:
    """Every number and text in it is within bounds. Raises WireError."""
    if len(body) > MAX_REQUEST_BYTES:
        raise WireError(f"a request of {len(body)} bytes is over the bound of {MAX_REQUEST_BYTES}")
    row = _unpack(body)
    if type(row) is not list or not row or type(row[0]) is not str:
        raise WireError("a request is not a list that begins with its kind")
    kind, *fields = row
    match kind:
        case "get":
            return _get(fields)
        case "ask":
            return _ask(fields)
        case "done":
            incarnation, step, part, name, holds = _typed(fields, int, int, int, str, bool)
            return Done(_version(incarnation, step), _within(part, MAX_PARTS), _text(name), holds)
        case "pair":
            (backends,) = _typed(fields, list)
            if len(backends) > MAX_BACKENDS:
                raise WireError(f"a pair is wanted with {len(backends)} backends, at most {MAX_BACKENDS} can be")
            return Pair(tuple(map(_text, backends)))
        case _:
            raise WireError(f"a request is of the unknown kind {kind[:MAX_TEXT]!r}")


def encode_header(header: Header) -> bytes:
    data = _HEADER.pack(
        header.status, header.codec, 0, header.chunk, header.wire_nbytes, header.nbytes, header.encode_us,
        header.digest, header.wire_digest,
    )  # fmt: skip
    return data + xxhash.xxh3_64_digest(data)


def decode_header(data: bytes) -> Header:
    """Raises WireError for a damaged one."""
    fields = data[: _HEADER.size]
    if xxhash.xxh3_64_digest(fields) != data[_HEADER.size :]:
        raise WireError("the header of a reply was damaged on the way")
    status, codec, _, chunk, wire_nbytes, nbytes, encode_us, digest, wire_digest = _HEADER.unpack(fields)
    try:
        return Header(Status(status), Codec(codec), chunk, wire_nbytes, nbytes, digest, wire_digest, encode_us)
    except ValueError as error:
        raise WireError(f"the header of a reply is not valid: {error}") from error


def header_fault(header: Header, chunk: int, nbytes: int, change: Change | None) -> str | None:
    """Why this is not the header of chunk number `chunk` of so many bytes, asked for like that, or None."""
    if (header.chunk, header.nbytes) != (chunk, nbytes):
        return f"chunk {header.chunk} of {header.nbytes} bytes came instead of chunk {chunk} of {nbytes}"
    if header.codec is Codec.RAW:
        return (
            None if header.wire_nbytes == nbytes else f"{header.wire_nbytes} bytes stand for {nbytes} of chunk {chunk}"
        )
    if change is None or header.codec is not change.codec:
        return f"chunk {chunk} came as {header.codec.key}, which was not asked for"
    if header.wire_nbytes >= nbytes:
        return f"chunk {chunk} is {header.wire_nbytes} bytes as a delta, and {nbytes} without"
    return None


def encode_parents(addresses: list[str]) -> bytes:
    data: bytes = msgpack.packb(addresses)
    return data


def decode_parents(body: bytes) -> list[str]:
    """Raises WireError."""
    row = _unpack(body)
    if type(row) is not list or len(row) > MAX_PARENTS:
        raise WireError(f"parents are not a list of at most {MAX_PARENTS} addresses")
    return [_text(address) for address in row]


def encode_refusal(reason: str) -> bytes:
    data: bytes = msgpack.packb([reason[:MAX_TEXT]])
    return data


def decode_refusal(body: bytes) -> str:
    """Raises WireError."""
    row = _unpack(body)
    if type(row) is not list or len(row) != 1:
        raise WireError("a refusal is not a list of one reason")
    return _text(row[0])


def encode_offer(offer: Offer) -> bytes:
    data: bytes = msgpack.packb([offer.port, offer.token, offer.backend])
    return data


def decode_offer(body: bytes) -> Offer:
    """Raises WireError."""
    row = _unpack(body)
    if type(row) is not list:
        raise WireError("the offer of a pair is no list")
    port, token, backend = _typed(row, int, str, str)
    return Offer(_within(port, 65535, 1), _text(token), _text(backend))


def _get(fields: list[Any]) -> Get:
    incarnation, step, part, nbytes, chunk_bytes, first, end, how = _typed(fields, *[int] * 7, list)
    chunks = -(-_within(nbytes, MAX_LAYOUT_BYTES) // _within(chunk_bytes, MAX_CHUNK_BYTES, ALIGNMENT))
    if not 0 <= first < end <= chunks:
        raise WireError(f"chunks {first} to {end} are asked for where a part has {chunks}")
    change = _change(*_typed(how, int, int, int, bytes)) if how else None
    return Get(_version(incarnation, step), _within(part, MAX_PARTS), nbytes, chunk_bytes, first, end, change)


def _change(incarnation: int, step: int, codec: int, runs: bytes) -> Change:
    codec = _within(codec, max(Codec), Codec.RAW + 1)
    return Change(_version(incarnation, step), Codec(codec), runs)


def _ask(fields: list[Any]) -> Ask:
    incarnation, step, part, name, address, parent, failed = _typed(fields, int, int, int, str, str, str, list)
    if len(failed) > MAX_FAILED:
        raise WireError(f"{len(failed)} peers failed at once, at most {MAX_FAILED} can be told")
    return Ask(
        _version(incarnation, step),
        _within(part, MAX_PARTS),
        _text(name),
        _text(address),
        _text(parent),
        tuple(map(_text, failed)),
    )


def _unpack(body: bytes) -> Any:
    try:
        return msgpack.unpackb(
            body, raw=False, use_list=True, max_str_len=MAX_TEXT * 4, max_bin_len=len(body), max_array_len=32,
            max_map_len=0, max_ext_len=0,
        )  # fmt: skip
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"a message is not valid msgpack: {error or type(error).__name__}") from error


def _typed(row: list[Any], *types: type) -> Any:
    if [type(value) for value in row] != list(types):
        raise WireError(f"a request is not made of {', '.join(kind.__name__ for kind in types)}")
    return row


def _within(value: int, bound: int, least: int = 0) -> int:
    if not least <= value <= bound:
        raise WireError(f"{value} in a request is not {least} to {bound}")
    return value


def _version(incarnation: int, step: int) -> PolicyVersion:
    return PolicyVersion(_within(incarnation, _MAX_NUMBER), _within(step, _MAX_NUMBER))


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_TEXT:
        raise WireError(f"a text in a message is longer than {MAX_TEXT} characters, or none")
    return value
