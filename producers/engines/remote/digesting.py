"""The checksum that an SGLang server computes of a tensor, computed here of the staged bytes.

A server on a CPU answers the first 8 bytes of SHA-256 over the tensor's bytes; one on a GPU a sum, over all 32-bit
words, of each word mixed with its place (`fmix32` of MurmurHash3), finished by `splitmix64`. Both in the server's own
dtype, so that the wire's may have to be converted first, as `Tensor.copy_` would: exactly, or to the nearest, ties to
even.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]

_MIX = (0x85EBCA6B, 0xC2B2AE35)
_PLACES = ((0x27D4EB2D, 15), (0x165667B1, 13))
_SEED = 0x243F6A88
_SEEDS = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
_TILE = 8192
_TILES = 64
"""Of so many at once: little enough to stay in the cache."""
_CONVERTED = 1 << 20
"""Elements that are converted at once."""


def converted(data: Bytes, wire: str, dtype: str) -> Iterator[Bytes]:
    """The same numbers in another dtype, piece by piece. Dtypes as in the manifest."""
    if wire == dtype:
        yield data
        return
    width = 4 if wire == "float32" else 2
    for first in range(0, len(data), _CONVERTED * width):
        yield _CAST[dtype](_WIDE[wire](data[first : first + _CONVERTED * width]))


def sha_64(pieces: Iterable[Bytes]) -> str:
    """As a server on a CPU writes it: 16 hexadecimal digits."""
    state = hashlib.sha256()
    for piece in pieces:
        state.update(np.ascontiguousarray(piece).data)
    return state.digest()[:8].hex()


def mixed_64(pieces: Iterable[Bytes]) -> str:
    """As a server on a GPU writes it: 16 hexadecimal digits. Some 300 MB a second."""
    whole = [np.ascontiguousarray(piece) for piece in pieces]
    data = whole[0] if len(whole) == 1 else np.concatenate(whole)
    if rest := -len(data) % 4:
        data = np.concatenate([data, np.zeros(rest, np.uint8)])
    words = data.view("<u4")
    if not len(words):
        return f"{0:016x}"
    total = 0
    for first in range(0, len(words), _TILE * _TILES):
        total += int(_tiles(words[first : first + _TILE * _TILES], first, len(words)).sum(dtype=np.uint64))
    return f"{_splitmix64(total & (1 << 64) - 1):016x}"


CHECKSUMS: dict[str, Callable[[Iterable[Bytes]], str]] = {"cpu": sha_64, "cuda": mixed_64}
"""By the server's device."""


def _tiles(words: Words, first: int, count: int) -> npt.NDArray[np.uint64]:
    """One number per tile. `first` is the place of the first word, `count` how many the whole tensor has."""
    place = np.arange(first, first + len(words), dtype=np.int64).astype(np.uint32)
    halves = []
    for (factor, turn), seed in zip(_PLACES, _SEEDS, strict=True):
        salt = (place * np.uint32(factor) + np.uint32(seed)) ^ (
            (place << np.uint32(turn)) | (place >> np.uint32(32 - turn))
        )
        mixed = _fmix32(words ^ salt)
        sums = np.add.reduceat(mixed, np.arange(0, len(words), _TILE), dtype=np.uint32)
        halves.append(_fmix32(sums ^ np.uint32((count * 4) & 0xFFFFFFFF)).astype(np.uint64))
    return (halves[0] << np.uint64(32)) | halves[1]


def _fmix32(words: Words) -> Words:
    words = words ^ (words >> np.uint32(16))
    words *= np.uint32(_MIX[0])
    words ^= words >> np.uint32(13)
    words *= np.uint32(_MIX[1])
    words ^= words >> np.uint32(16)
    return words


def _splitmix64(number: int) -> int:
    mask = (1 << 64) - 1
    number ^= number >> 30
    number = number * 0xBF58476D1CE4E5B9 & mask
    number ^= number >> 27
    number = number * 0x94D049BB133111EB & mask
    return number ^ number >> 31


def _from_bfloat16(data: Bytes) -> npt.NDArray[np.float32]:
    return (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_bfloat16(numbers: npt.NDArray[np.float32]) -> Bytes:
    bits = numbers.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Adding would make an infinity, or a zero, of some that are not numbers.
    rounded[np.isnan(numbers)] = 0x7FC0
    return rounded.astype("<u2").view(np.uint8)


def _to_float16(numbers: npt.NDArray[np.float32]) -> Bytes:
    with np.errstate(over="ignore"):
        return numbers.astype("<f2").view(np.uint8)


_WIDE: dict[str, Callable[[Bytes], npt.NDArray[np.float32]]] = {
    "bfloat16": _from_bfloat16,
    "float16": lambda data: data.view("<f2").astype(np.float32),
    "float32": lambda data: data.view("<f4"),
}
_CAST: dict[str, Callable[[npt.NDArray[np.float32]], Bytes]] = {
    "bfloat16": _to_bfloat16,
    "float16": _to_float16,
    "float32": lambda numbers: numbers.astype("<f4").view(np.uint8),
}
