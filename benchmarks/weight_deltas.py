"""The lossless deltas of weight versions, against what they could be at the least and against compressed xor.

    figure              bar      what is divided by what
    delta_vs_entropy    ≤ 1.25   bytes of sparse-ulp, over the entropy of which elements changed and by how many steps
    delta_vs_xor        ≤ 0.6    bytes of sparse-ulp, over those of xor and zstd at level 1
    delta_share         -        bytes of sparse-ulp, over those of the whole versions
    first_delta_share   -        the same of the first step after the optimizer was new
    absolute_share      -        bytes of sparse-abs, over those of the whole versions
    encode_vs_memcpy    0.1      bytes of the version per second of sparse-ulp's encode, over those of memcpy
    apply_vs_memcpy     0.2      the same of its decode, which writes into the base
    full_vs_delta       5        seconds that a version takes over 1 Gb/s, over those of its delta, coded and applied

20 real AdamW steps (`benchmarks/weight_steps.py`) at a learning rate of 1e-6, float32 master weights cast to bfloat16
after each; in chunks of 4 MiB. The entropy takes changes as independent of each other and equally likely everywhere,
and steps as drawn from their own histogram. Speeds are of one core, in processor time, on the last step's version
repeated to 64 MiB; medians of interleaved repeats. Seconds of full_vs_delta are computed from bytes and speeds, as if
coding, sending and applying did not overlap.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from benchmarks.report import Figure, arguments, report
from benchmarks.weight_steps import Versions, bfloat16_versions
from headrace.policy.memory import keep_freed_memory
from weightsync import codecs
from weightsync.codecs.ulp import steps_between
from weightsync.placement import Bytes

BARS: dict[str, float | None] = {
    "delta_vs_entropy": 1.25,
    "delta_vs_xor": 0.6,
    "delta_share": None,
    "first_delta_share": None,
    "absolute_share": None,
    "encode_vs_memcpy": 0.1,
    "apply_vs_memcpy": 0.2,
    "full_vs_delta": 5.0,
}
CHUNK_BYTES = 4 << 20
SPEED_BYTES = 64 << 20
LINK_BYTES_PER_S = 125e6
DTYPE = "bfloat16"

Bits = npt.NDArray[np.uint16]


def chunks(*versions: Bits) -> Iterator[list[Bytes]]:
    """The same chunk of each of them, one chunk after the other."""
    parts = [version.view(np.uint8) for version in versions]
    for start in range(0, parts[0].nbytes, CHUNK_BYTES):
        yield [part[start : start + CHUNK_BYTES] for part in parts]


def encoded(codec: str, old: Bits, new: Bits) -> list[bytes | memoryview]:
    """The payloads of all chunks."""
    encode = codecs.get(codec).encode
    return [encode(base, chunk, DTYPE) for base, chunk in chunks(old, new)]


def encoded_bytes(codec: str, old: Bits, new: Bits) -> int:
    return sum(len(payload) for payload in encoded(codec, old, new))


def xor_bytes(old: Bits, new: Bits) -> int:
    compressor = zstandard.ZstdCompressor(level=1)
    return sum(len(compressor.compress((base ^ chunk).data)) for base, chunk in chunks(old, new))


def entropy_bytes(old: Bits, new: Bits) -> float:
    """Bytes of independent changes, and of their steps by histogram."""
    changed = old != new
    steps = steps_between(old[changed], new[changed])
    bits = _entropy(np.bincount(changed, minlength=2)) + _entropy(np.bincount(steps))
    return bits / 8


def _entropy(counts: npt.NDArray[Any]) -> float:
    """Bits of so many symbols of each kind, in the best code for their shares."""
    counts = counts[counts > 0]
    return float((counts * np.log2(counts.sum() / counts)).sum())


def size_figures(versions: Versions) -> dict[str, Figure]:
    """delta_vs_entropy and delta_vs_xor over all steps between these versions."""
    delta = sum(encoded_bytes("sparse-ulp", old, new) for old, new in pairwise(versions))
    baselines = {
        "delta_vs_entropy": sum(entropy_bytes(old, new) for old, new in pairwise(versions)),
        "delta_vs_xor": sum(xor_bytes(old, new) for old, new in pairwise(versions)),
    }
    return {
        name: Figure(delta, "bytes", baseline, delta / baseline, BARS[name], at_most=True)
        for name, baseline in baselines.items()
    }


def share_figures(versions: Versions) -> dict[str, Figure]:
    def share(codec: str, pairs: list[tuple[Bits, Bits]]) -> Figure:
        size, whole = sum(encoded_bytes(codec, *pair) for pair in pairs), sum(new.nbytes for _, new in pairs)
        return Figure(size, "bytes", whole, size / whole)

    pairs = [*pairwise(versions)]
    return {
        "delta_share": share("sparse-ulp", pairs),
        "first_delta_share": share("sparse-ulp", pairs[:1]),
        "absolute_share": share("sparse-abs", pairs),
    }


def speed_figures(old: Bits, new: Bits, repeats: int) -> dict[str, Figure]:
    """Of sparse-ulp, on this step repeated until no cache holds it."""
    old, new = (np.resize(version, SPEED_BYTES // version.itemsize) for version in (old, new))
    out, decode = old.copy(), codecs.get("sparse-ulp").decode
    payloads = encoded("sparse-ulp", old, new)

    def apply() -> None:
        for payload, (chunk,) in zip(payloads, chunks(out), strict=True):
            decode(payload, chunk, DTYPE)

    taken: dict[str, list[float]] = {"memcpy": [], "encode": [], "apply": []}
    for _ in range(repeats):
        taken["memcpy"].append(_seconds(lambda: np.copyto(out, old)))
        taken["encode"].append(_seconds(lambda: encoded("sparse-ulp", old, new)))
        taken["apply"].append(_seconds(apply))
        assert np.array_equal(out, new), "a delta did not give the version's bits"
    memcpy_s, encode_s, apply_s = (statistics.median(one) for one in taken.values())
    rates = {"encode_vs_memcpy": encode_s, "apply_vs_memcpy": apply_s}
    figures = {
        name: Figure(new.nbytes / seconds / 1e9, "GB/s", new.nbytes / memcpy_s / 1e9, memcpy_s / seconds, BARS[name])
        for name, seconds in rates.items()
    }
    full_s = new.nbytes / LINK_BYTES_PER_S
    delta_s = sum(len(payload) for payload in payloads) / LINK_BYTES_PER_S + encode_s + apply_s
    return figures | {"full_vs_delta": Figure(full_s, "s", delta_s, full_s / delta_s, BARS["full_vs_delta"])}


def _seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def main() -> int:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    keep_freed_memory()
    versions = bfloat16_versions()
    figures = size_figures(versions) | share_figures(versions)
    figures |= speed_figures(versions[-2], versions[-1], options.repeats)
    return report("weight deltas, one core", figures, json_file=options.json, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
