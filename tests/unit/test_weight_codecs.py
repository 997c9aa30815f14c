"""Codecs of weight chunks: what went in comes out, bit for bit, whatever the bits; deltas are as small as they say."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import WeightError
from weightsync import codecs
from weightsync.manifest import DTYPE_BYTES, MAX_CHUNK_BYTES
from weightsync.placement import Bytes

DELTAS = ["sparse-abs", "sparse-ulp"]
SPECIAL = {
    # 0, the least and the largest denormal, the least normal, 1 and its neighbours, the largest, infinity, NaNs
    "bfloat16": [0, 1, 0x7F, 0x80, 0x3F7F, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF],
    "float16": [0, 1, 0x3FF, 0x400, 0x3BFF, 0x3C00, 0x3C01, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7FFF],
    "float32": [
        *(0, 1, 0x7F_FFFF, 0x80_0000, 0x3F7F_FFFF, 0x3F80_0000, 0x3F80_0001),
        *(0x7F7F_FFFF, 0x7F80_0000, 0x7F80_0001, 0x7FC0_0000, 0x7FFF_FFFF),
    ],
}


def bits_of(values: list[int] | npt.NDArray[np.integer], dtype: str) -> Bytes:
    return np.array(values, dtype=f"<u{DTYPE_BYTES[dtype]}").view(np.uint8)


@st.composite
def changes(draw: st.DrawFn) -> tuple[str, Bytes, Bytes]:
    """A dtype, a base, and a new chunk of which few, many, all or none of the elements are others."""
    dtype = draw(st.sampled_from([*DTYPE_BYTES]))
    top = 1 << (8 * DTYPE_BYTES[dtype])
    count = draw(st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 63, 200, 301]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    special = np.array(SPECIAL[dtype], np.int64)
    special = np.concatenate([special, special | (top >> 1)])
    old = np.where(rng.random(count) < 0.5, rng.choice(special, count), rng.integers(0, top, count))
    changed = rng.random(count) < draw(st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]))
    ways = {
        "steps": lambda: old + rng.integers(-3, 4, count),
        "random": lambda: rng.integers(0, top, count),
        "signs": lambda: old ^ (top >> 1),
        "special": lambda: rng.choice(special, count),
    }
    new = np.where(changed, ways[draw(st.sampled_from([*ways]))](), old) % top
    return dtype, bits_of(old, dtype), bits_of(new, dtype)


@given(change=changes())
@pytest.mark.parametrize("name", codecs.CODECS)
def test_every_bit_comes_back(name: str, change: tuple[str, Bytes, Bytes]) -> None:
    dtype, old, new = change
    codec, out = codecs.get(name), old.copy()
    payload = codec.encode(None if codec.name == "raw" else old, new, dtype)
    codec.decode(payload, out, dtype)
    assert out.tobytes() == new.tobytes()
    assert len(payload) <= new.nbytes + 1


@given(change=changes())
@pytest.mark.parametrize("name", ["raw", "sparse-abs"])
def test_applied_twice_is_applied_once(name: str, change: tuple[str, Bytes, Bytes]) -> None:
    dtype, old, new = change
    codec, out = codecs.get(name), old.copy()
    payload = codec.encode(old, new, dtype)
    for _ in range(2):
        codec.decode(payload, out, dtype)
    assert out.tobytes() == new.tobytes()


def test_ten_thousand_random_deltas_are_exact() -> None:
    rng = np.random.default_rng(5)
    for number in range(10_000):
        name, dtype = DELTAS[number % 2], [*DTYPE_BYTES][number % 3]
        width = DTYPE_BYTES[dtype]
        old = rng.integers(0, 256, (int(rng.integers(0, 160)), width), dtype=np.uint8)
        new = old.copy()
        changed = rng.random(len(old)) < (0.02, 0.2, 1.0)[number % 5 % 3]
        flips = rng.integers(0, 256, (int(changed.sum()), width), dtype=np.uint8)
        new[changed] ^= flips * (np.arange(width, dtype=np.uint8) <= number % 7)
        out = old.ravel().copy()
        codecs.get(name).decode(codecs.get(name).encode(old.ravel(), new.ravel(), dtype), out, dtype)
        assert out.tobytes() == new.tobytes(), f"number {number}: {name}, {len(old)} of {dtype}"


@pytest.mark.parametrize("places", [[], [0], [999_999], [65_535, 65_536], [0, 65_537], [3, 259, 515, 66_052, 999_000]])
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("name", DELTAS)
def test_far_apart_changes(name: str, dtype: str, places: list[int]) -> None:
    old = bits_of(np.arange(1_000_000) % 60_000, dtype)
    new = old.copy()
    new.view(f"<u{DTYPE_BYTES[dtype]}")[places] ^= 1
    codec, out = codecs.get(name), old.copy()
    payload = codec.encode(old, new, dtype)
    assert len(payload) < 80
    codec.decode(payload, out, dtype)
    assert np.array_equal(out, new)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("name", DELTAS)
def test_mostly_other_bits_travel_as_they_are(name: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    old, new = rng.integers(0, 256, (2, 40_000), dtype=np.uint8)
    payload = codecs.get(name).encode(old, new, dtype)
    assert payload == b"\0" + new.tobytes()


def test_raw_copies_nothing() -> None:
    new = np.arange(8, dtype=np.uint8)
    assert np.shares_memory(np.frombuffer(codecs.get("raw").encode(None, new, "bfloat16"), np.uint8), new)


@pytest.mark.parametrize(
    ("name", "planes"),
    [
        # Gaps 3, 0, 300, 0 less their high byte, then that; values likewise.
        ("sparse-abs", [[3, 0, 44, 0], [0, 0, 1, 0], [0x81, 0x7F, 0x00, 0xFF], [0x3F, 0x3F, 0x80, 0x3E]]),
        # One up; one down; from 0 to -0, which is below it; 129 down, where the exponent ends in between.
        ("sparse-ulp", [[3, 0, 44, 0], [0, 0, 1, 0], [2, 1, 1, 1], [0, 0, 0, 1]]),
    ],
)
def test_bytes_of_a_delta(name: str, planes: list[list[int]]) -> None:
    old = np.zeros(1000, "<u2")
    new = old.copy()
    places = [3, 4, 305, 306]
    old[places] = [0x3F80, 0x3F80, 0x0000, 0x3F80]
    new[places] = [0x3F81, 0x3F7F, 0x8000, 0x3EFF]
    payload = codecs.get(name).encode(old.view(np.uint8), new.view(np.uint8), "bfloat16")
    assert payload[:7] == struct.pack("<BIBB", 1, 4, 2, 2)
    assert list(zstandard.decompress(payload[7:])) == [byte for plane in planes for byte in plane]


@pytest.mark.parametrize(
    ("places", "step", "widths"),
    [
        ([], 1, (0, 0)),
        ([0, 1, 2], 1, (0, 1)),
        ([0, 256], 127, (1, 1)),
        ([0, 257], 128, (2, 2)),
        ([65_535, 65_536], 1, (2, 1)),
        ([65_536, 65_537], 1, (3, 1)),
    ],
)
def test_planes_of_zeros_are_left_out(places: list[int], step: int, widths: tuple[int, int]) -> None:
    old = np.full(70_000, 0x3F00, "<u2")
    new = old.copy()
    new[places] += step
    payload = codecs.get("sparse-ulp").encode(old.view(np.uint8), new.view(np.uint8), "bfloat16")
    assert struct.unpack_from("<BIBB", payload) == (1, len(places), *widths)
    assert zstandard.frame_content_size(payload[7:]) == len(places) * sum(widths)


def test_steps_take_half_of_what_the_new_values_take() -> None:
    rng = np.random.default_rng(2)
    old = (rng.standard_normal(200_000) * 0.02).astype(np.float32).view(np.uint32) >> 16
    new = np.where(rng.random(old.size) < 0.02, old + rng.choice([-1, 1], old.size), old)
    sizes = {
        name: len(codecs.get(name).encode(bits_of(old, "bfloat16"), bits_of(new, "bfloat16"), "bfloat16"))
        for name in DELTAS
    }
    # Entropy: 0.1414 bits for where, 0.02 for which way, of 16.
    assert sizes["sparse-ulp"] < 1.15 * (0.1614 / 16) * 400_000
    assert sizes["sparse-ulp"] < 0.6 * sizes["sparse-abs"]


def test_many_threads_at_once() -> None:
    rng = np.random.default_rng(3)
    old = rng.integers(0, 256, (16, 1 << 18), dtype=np.uint8)
    new = old ^ (rng.random(old.shape) < 0.02)

    def round_trip(job: int) -> bool:
        codec, row = codecs.get(DELTAS[job % 2]), job % len(old)
        out = old[row].copy()
        codec.decode(codec.encode(old[row], new[row], "bfloat16"), out, "bfloat16")
        return np.array_equal(out, new[row])

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(round_trip, range(96)))


@pytest.mark.parametrize("name", DELTAS)
@pytest.mark.parametrize("base", [None, np.zeros(6, np.uint8)])
def test_a_delta_needs_a_base_as_long(name: str, base: Bytes | None) -> None:
    with pytest.raises(WeightError, match=f"codec {name} needs a base of 8 bytes"):
        codecs.get(name).encode(base, np.zeros(8, np.uint8), "float32")


def test_a_chunk_is_of_whole_elements_of_a_known_dtype() -> None:
    codec, six = codecs.get("sparse-ulp"), np.zeros(6, np.uint8)
    with pytest.raises(WeightError, match="6 bytes are not whole float32 elements"):
        codec.encode(six, six, "float32")
    with pytest.raises(WeightError, match=f"in a chunk of at most {MAX_CHUNK_BYTES}"):
        codec.decode(b"", np.zeros(MAX_CHUNK_BYTES + 4, np.uint8), "float32")
    with pytest.raises(WeightError, match="dtype 'int8' is not known; weights travel as bfloat16"):
        codec.decode(b"", six, "int8")


def test_a_codec_is_known_by_its_name() -> None:
    assert [codecs.get(name).name for name in codecs.CODECS] == [*codecs.CODECS]
    with pytest.raises(WeightError, match="codec 'lzma' is not known; use raw, sparse-abs, sparse-ulp"):
        codecs.get("lzma")
