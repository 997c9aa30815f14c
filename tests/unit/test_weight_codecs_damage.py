"""Damaged and made-up payloads: refused, or other bits; never a crash, a write beside the chunk, or much memory."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard

from headrace.errors import WireError
from weightsync import codecs
from weightsync.manifest import DTYPE_BYTES
from weightsync.placement import Bytes

DELTAS = ["sparse-abs", "sparse-ulp"]
CHUNK, GUARD = 4096, 256


def refused(name: str, payload: bytes, dtype: str = "bfloat16", chunk: int = CHUNK) -> str | None:
    """The reason, or None for bits. Whatever lies beside the chunk stays as it is."""
    memory = np.full(chunk + 2 * GUARD, 0xA5, np.uint8)
    try:
        codecs.get(name).decode(payload, memory[GUARD : GUARD + chunk], dtype)
        reason = None
    except WireError as error:
        reason = str(error)
    assert (memory[:GUARD] == 0xA5).all()
    assert (memory[GUARD + chunk :] == 0xA5).all()
    return reason


def change(dtype: str, share: float = 0.05) -> tuple[Bytes, Bytes]:
    rng = np.random.default_rng(7)
    old = rng.integers(0, 256, CHUNK, dtype=np.uint8)
    new = old.copy()
    changed = rng.random(CHUNK // DTYPE_BYTES[dtype]) < share
    new.reshape(changed.size, -1)[changed, 0] ^= rng.integers(1, 256, int(changed.sum()), dtype=np.uint8)
    return old, new


def sparse(count: int, gap_width: int, value_width: int, frame: bytes) -> bytes:
    return struct.pack("<BIBB", 1, count, gap_width, value_width) + frame


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("name", DELTAS)
def test_any_byte_flipped(name: str, dtype: str) -> None:
    payload = codecs.get(name).encode(*change(dtype), dtype)
    assert payload[0] == 1
    reasons = set()
    for place in range(len(payload)):
        for mask in (0x01, 0x10, 0x80, 0xFF):
            damaged = bytearray(payload)
            damaged[place] ^= mask
            reasons.add(refused(name, bytes(damaged), dtype))
    assert len(reasons) > 5, "hardly any flip was refused"


@pytest.mark.parametrize("name", DELTAS)
@pytest.mark.parametrize("share", [0.05, 1.0])
def test_cut_short_and_too_long(name: str, share: float) -> None:
    payload = bytes(codecs.get(name).encode(*change("float16", share), "float16"))
    for length in range(len(payload)):
        assert refused(name, payload[:length], "float16"), f"{length} of {len(payload)} bytes were taken"
    for more in (b"\0", payload, zstandard.compress(b"more")):
        assert refused(name, payload + more, "float16")


@pytest.mark.parametrize("name", DELTAS)
def test_random_bytes(name: str) -> None:
    rng = np.random.default_rng(11)
    for _ in range(3000):
        garbage = bytearray(rng.bytes(int(rng.integers(0, 64))))
        if garbage and rng.random() < 0.9:
            garbage[0] = 1
        assert refused(name, bytes(garbage))


@pytest.mark.parametrize("name", DELTAS)
def test_random_planes_stay_inside_the_chunk(name: str) -> None:
    rng = np.random.default_rng(13)
    taken = 0
    for _ in range(2000):
        count, gap_width, value_width = (int(rng.integers(0, high)) for high in (40, 6, 4))
        planes = rng.bytes(count * (gap_width + value_width)).replace(b"\xff", b"\0")
        reason = refused(name, sparse(count, gap_width, value_width, zstandard.compress(planes)))
        taken += reason is None
    assert taken, "no made-up delta was taken at all"


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "not a delta"),
        (b"\2" + bytes(CHUNK), "not a delta"),
        (b"\0" + bytes(CHUNK - 1), f"a chunk of {CHUNK} bytes came as {CHUNK - 1} bytes"),
        (b"\0" + bytes(CHUNK + 1), f"a chunk of {CHUNK} bytes came as {CHUNK + 1} bytes"),
        (sparse(0, 1, 1, b"")[:-1], "^a chunk came with bytes that are not a delta"),
        (sparse(0, 0, 0, b""), "does not decompress"),
        (sparse(2049, 1, 1, b""), "says 2049 changes of 1 [+] 1 bytes; the chunk has 2048 elements of 2"),
        (sparse(1, 5, 1, zstandard.compress(bytes(6))), "says 1 changes of 5 [+] 1 bytes"),
        (sparse(1, 1, 3, zstandard.compress(bytes(4))), "says 1 changes of 1 [+] 3 bytes"),
        (sparse(1, 1, 1, zstandard.compress(bytes(3))), "holds 3 bytes, its header says 2"),
        (sparse(1, 2, 1, zstandard.compress(b"\x00\x08\1")), "changes element 2048 of a chunk that has 2048"),
        (sparse(2, 2, 1, zstandard.compress(b"\xff\x00\x07\x00\1\1")), "changes element 2048 of a chunk that has 2048"),
        (sparse(2, 4, 1, zstandard.compress(b"\xff" * 10)), "changes element 8589934591"),
    ],
)
@pytest.mark.parametrize("name", DELTAS)
def test_what_is_wrong_is_said(name: str, payload: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        codecs.get(name).decode(payload, np.zeros(CHUNK, np.uint8), "bfloat16")


def test_the_last_element_can_be_changed() -> None:
    assert refused("sparse-abs", sparse(1, 2, 1, zstandard.compress(b"\xff\x07\1"))) is None


@pytest.mark.parametrize("length", [0, CHUNK - 1, CHUNK + 1])
def test_raw_of_another_length(length: int) -> None:
    assert refused("raw", bytes(length)) == f"a chunk of {CHUNK} bytes came as {length} bytes"


@pytest.mark.parametrize("name", DELTAS)
def test_a_frame_that_would_fill_the_memory(name: str) -> None:
    giant = zstandard.ZstdCompressor(level=1).compress(bytes(64 << 20))
    silent = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(64 << 20))
    # Magic, a descriptor with an 8-byte content size and a window, the window, the size.
    lying = b"\x28\xb5\x2f\xfd\xc0\xf8" + struct.pack("<Q", 1 << 50) + bytes(16)
    tracemalloc.start()
    try:
        for frame in (giant, silent, lying):
            assert refused(name, sparse(100, 1, 1, frame))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
