"""A server's checksums, computed here: the hashes against plain integers, the conversion to its dtype against torch."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from producers.engines.remote.digesting import Bytes, converted, mixed_64, sha_64

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MASK = (1 << 32) - 1


def plainly_mixed(data: bytes) -> str:
    """As `mixed_64`, a word at a time: the sums of tiles of 8192 words, two halves each, and of all tiles."""

    def fmix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B & MASK
        x ^= x >> 13
        x = x * 0xC2B2AE35 & MASK
        return x ^ x >> 16

    def turned(x: int, by: int) -> int:
        return (x << by | x >> 32 - by) & MASK

    data += b"\0" * (-len(data) % 4)
    words = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
    if not words:
        return "0" * 16
    seeds = 0x243F6A88, (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & MASK
    total = 0
    for tile in range(0, len(words), 8192):
        high = low = 0
        for at in range(tile, min(tile + 8192, len(words))):
            high += fmix(words[at] ^ ((at * 0x27D4EB2D + seeds[0]) & MASK ^ turned(at, 15)))
            low += fmix(words[at] ^ ((at * 0x165667B1 + seeds[1]) & MASK ^ turned(at, 13)))
        nbytes = len(words) * 4
        total += fmix(high & MASK ^ nbytes) << 32 | fmix(low & MASK ^ nbytes)
    x = total & (1 << 64) - 1
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & (1 << 64) - 1
    return f"{x ^ x >> 31:016x}"


def random_bytes(count: int) -> Bytes:
    return np.random.default_rng(count).integers(0, 256, count, np.uint8)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 4099, 8192 * 4 - 2, 8192 * 4 * 3 + 8])
def test_the_checksum_of_a_gpu_is_that_of_plain_integers(count: int) -> None:
    data = random_bytes(count)
    assert mixed_64([data]) == plainly_mixed(data.tobytes())


def test_more_tiles_than_are_mixed_at_once() -> None:
    data = random_bytes(8192 * 4 * 65 + 12)
    assert mixed_64([data]) == plainly_mixed(data.tobytes())


def test_pieces_are_as_the_whole() -> None:
    data = random_bytes(1000)
    for checksum in (sha_64, mixed_64):
        assert checksum([data[:1], data[1:333], data[333:]]) == checksum([data])


def test_the_checksum_of_a_cpu_begins_sha_256() -> None:
    data = random_bytes(1000)
    assert sha_64([data]) == hashlib.sha256(data.tobytes()).hexdigest()[:16]


@settings(deadline=None)
@given(arrays(np.uint16, st.integers(1, 50)), st.sampled_from(["bfloat16", "float16"]), st.sampled_from(list(DTYPES)))
def test_any_half_converts_as_torch_does(bits: np.ndarray, wire: str, dtype: str) -> None:
    same_as_torch(bits.view(np.uint8), wire, dtype)


@settings(deadline=None)
@given(arrays(np.uint32, st.integers(1, 50)), st.sampled_from(list(DTYPES)))
def test_any_single_converts_as_torch_does(bits: np.ndarray, dtype: str) -> None:
    same_as_torch(bits.view(np.uint8), "float32", dtype)


def test_a_long_tensor_converts_in_pieces() -> None:
    data = np.random.default_rng(0).standard_normal((1 << 20) + 5).astype(np.float32).view(np.uint8)
    same_as_torch(data, "float32", "bfloat16")
    assert len(list(converted(data, "float32", "bfloat16"))) == 2


def same_as_torch(data: Bytes, wire: str, dtype: str) -> None:
    ours = b"".join(piece.tobytes() for piece in converted(data, wire, dtype))
    theirs = torch.from_numpy(data.copy()).view(DTYPES[wire]).to(DTYPES[dtype])
    got = torch.frombuffer(bytearray(ours), dtype=DTYPES[dtype])
    # Which number is none is nobody's business; no model that trains holds any.
    real = ~theirs.isnan()
    assert torch.equal(got.isnan(), theirs.isnan())
    assert torch.equal(got[real].view(torch.uint8), theirs[real].view(torch.uint8))
