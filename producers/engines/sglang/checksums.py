"""Whether a server computes with what was staged: its own checksums against those of the staged bytes.

A server answers success for a version of which it loaded a part, or nothing (names that it does not know are passed
over). So after each update it is asked for the checksum of each of its tensors. It fuses some (`qkv_proj`,
`gate_up_proj`), pads the rows of a vocabulary, and may compute in another dtype than the wire's; which it does is tried
out once per tensor. A server that computes no checksums is asked for the first row of each tensor instead.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from producers.engines.sglang.digesting import CHECKSUMS, Bytes, converted
from producers.engines.sglang.staged import Staged
from weightsync.manifest import DTYPE_BYTES, Layout, TensorSpec

Verify = Literal["all", "sample", "off"]
"""How much of an update is compared: every tensor, another eighth of them after each update, or nothing."""

SAMPLES = 8
ROWS_PADDED = 64
"""A server fills vocabularies up to a multiple of this with rows of zeros."""
_FUSED = (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_NAMED = 3
"""So many tensors that differ are named."""

Checksums = Mapping[str, str]


class AsksForWeights(Protocol):
    """What is asked of a server here. Raises whatever the client raises."""

    async def weights_checker(self, *, action: str, skip_tensor_list: Sequence[str]) -> dict[str, Any]: ...

    async def get_weights_by_name(self, name: str, *, truncate_size: int) -> Any: ...


class Checker(Protocol):
    """Of one server and one layout."""

    @property
    def what(self) -> str:
        """What it compares, in words, for a log line."""
        ...

    @property
    def unknown(self) -> Sequence[str]:
        """Tensors of the wire that the server surely does not load."""
        ...

    def prepare(self, staged: Staged) -> None:
        """What can be computed before the server stands still. Any thread."""
        ...

    async def fault(self, client: AsksForWeights, staged: Staged, *, whole: bool) -> str | None:
        """How the server's weights differ from the staged version, or None. `whole` compares all tensors."""
        ...


@dataclass(frozen=True, slots=True)
class Form:
    """How a server keeps one tensor."""

    dtype: str
    rows_padded: bool = False


@dataclass(frozen=True, slots=True)
class Comparable:
    """One tensor of a server, and those of the wire that it is made of, one below the other."""

    name: str
    sources: tuple[TensorSpec, ...]

    def forms(self, likely: str) -> Iterator[Form]:
        """In which it may be kept, the most likely first."""
        vocabulary = len(self.sources) == 1 and len(self.sources[0].shape) == 2
        padded = vocabulary and self.sources[0].shape[0] % ROWS_PADDED != 0
        for dtype in sorted(DTYPE_BYTES, key=lambda dtype: dtype != likely):
            yield Form(dtype)
            if padded:
                yield Form(dtype, rows_padded=True)

    def bytes(self, staged: Staged, form: Form) -> Iterator[Bytes]:
        """As the server keeps it."""
        for spec in self.sources:
            yield from converted(staged.tensor(spec), spec.dtype, form.dtype)
        if form.rows_padded:
            rows, width = self.sources[0].shape
            yield np.zeros(-rows % ROWS_PADDED * width * DTYPE_BYTES[form.dtype], np.uint8)

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.sources)

    @property
    def whole(self) -> bool:
        """Whether every rank of a server has all of it: true of norms."""
        return len(self.sources) == 1 and len(self.sources[0].shape) == 1 and "norm" in self.name


class ChecksumChecker:
    """By the checksums that the server computes."""

    def __init__(self, layout: Layout, ranks: Sequence[Checksums], *, device: str, dtype: str, sample: bool) -> None:
        """`ranks` is what the server answered once: the names of its tensors. `dtype` is the likely one."""
        self._checksum = CHECKSUMS[device]
        names = {name: None for rank in ranks for name in rank}
        made_of = made(layout, names)
        self._found = {one.name: one for one in made_of if len(ranks) == 1 or one.whole}
        self._forms: dict[str, Form] = {}
        self._dtype = dtype
        self._names = set(names)
        self._turn = 0
        self._sample = sample
        loaded = {spec.name for one in made_of for spec in one.sources}
        compared = {spec.name for one in self._found.values() for spec in one.sources}
        self.unknown = [spec.name for spec in layout.tensors if spec.name not in loaded]
        """On the wire, and in no tensor of the server: its loader would pass them over."""
        self._not_compared = len(layout.tensors) - len(compared)

    @property
    def what(self) -> str:
        share = (
            f", an eighth of {len(self._found)} tensors in turn" if self._sample else f" of {len(self._found)} tensors"
        )
        left = f"; {self._not_compared} of the version's cannot be compared" if self._not_compared else ""
        return f"the server's checksums{share}{left}"

    def prepare(self, staged: Staged) -> None:
        for name in self._due(whole=False):
            if name in self._forms:
                self._expected(staged, self._found[name], self._forms[name])

    async def fault(self, client: AsksForWeights, staged: Staged, *, whole: bool) -> str | None:
        due = self._due(whole=whole)
        skipped = sorted(self._names - due)
        ranks = checksums_of(await client.weights_checker(action="checksum", skip_tensor_list=skipped))
        self._turn += 1
        return await asyncio.to_thread(self._compare, staged, ranks, due)

    def _due(self, *, whole: bool) -> set[str]:
        if whole or not self._sample:
            return set(self._found)
        turn = self._turn % SAMPLES
        return {name for name in self._found if zlib.crc32(name.encode()) % SAMPLES == turn}

    def _compare(self, staged: Staged, ranks: Sequence[Checksums], due: set[str]) -> str | None:
        # The smallest first: it tells the dtype for little.
        names = sorted(due, key=lambda name: self._found[name].nbytes)
        wrong = [
            name
            for name in names
            if not self._right(staged, self._found[name], [rank[name] for rank in ranks if name in rank])
        ]
        return _in_words("have other checksums than the staged ones", wrong, len(due))

    def _right(self, staged: Staged, found: Comparable, answered: Sequence[str]) -> bool:
        return bool(answered) and all(self._same(staged, found, one) for one in answered)

    def _same(self, staged: Staged, found: Comparable, answered: str) -> bool:
        known = self._forms.get(found.name)
        if known is not None:
            return self._expected(staged, found, known) == answered
        for form in found.forms(self._dtype):
            if self._expected(staged, found, form) == answered:
                self._forms[found.name] = form
                self._dtype = form.dtype
                return True
        return False

    def _expected(self, staged: Staged, found: Comparable, form: Form) -> str:
        """Computed once per version, for all servers that it goes to."""
        key = (found.name, form, self._checksum)
        if key not in staged.computed:
            staged.computed[key] = self._checksum(found.bytes(staged, form))
        return staged.computed[key]


class RowChecker:
    """By the first row of each tensor: for a server that computes no checksums."""

    unknown: Sequence[str] = ()

    def __init__(self, layout: Layout, why: str, *, sample: bool) -> None:
        self._specs = layout.tensors
        self._why = why
        self._turn = 0
        self._sample = sample

    @property
    def what(self) -> str:
        return f"only the first row of each tensor, as this server computes no checksums ({self._why})"

    def prepare(self, staged: Staged) -> None:
        pass

    async def fault(self, client: AsksForWeights, staged: Staged, *, whole: bool) -> str | None:
        turn = self._turn % SAMPLES
        self._turn += 1
        specs = [spec for at, spec in enumerate(self._specs) if whole or not self._sample or at % SAMPLES == turn]
        wrong = [
            spec.name
            for spec in specs
            if not same_row(staged, spec, await client.get_weights_by_name(spec.name, truncate_size=1))
        ]
        return _in_words("have another first row than the staged ones", wrong, len(specs))


def made(layout: Layout, names: Iterable[str]) -> list[Comparable]:
    """Those of a server's tensors of which is known what they are made of."""
    known = {spec.name: spec for spec in layout.tensors}
    found = [Comparable(name, tuple(known[source] for source in sources(name, known))) for name in names]
    return [one for one in found if one.sources]


def sources(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """The tensors of the wire that a server's tensor is made of, in its order; none where that is not known."""
    if name in known:
        return (name,)
    for fused, parts in _FUSED:
        made_of = tuple(name.replace(f".{fused}.", f".{part}.") for part in parts)
        if f".{fused}." in name and all(part in known for part in made_of):
            return made_of
    # A server whose head is a tensor of its own although the model ties it.
    return (_EMBEDDING,) if name == _HEAD and _EMBEDDING in known else ()


def checksums_of(answer: Mapping[str, Any]) -> list[Checksums]:
    """By name, of each rank. Raises KeyError or TypeError for an answer that is none."""
    return [{str(name): str(value) for name, value in rank["checksums"].items()} for rank in answer["ranks"]]


def same_row(staged: Staged, spec: TensorSpec, answered: Any) -> bool:
    """Whether that is the tensor's first row; a server answers it as float32, in its dtype's precision."""
    row = np.asarray(answered, np.float32).reshape(-1) if answered is not None else np.empty(0, np.float32)
    width = spec.nbytes // DTYPE_BYTES[spec.dtype] // (spec.shape[0] if len(spec.shape) > 1 else 1)
    width = width if len(spec.shape) > 1 else 1
    data = staged.tensor(spec)[: width * DTYPE_BYTES[spec.dtype]]
    for dtype in DTYPE_BYTES:
        kept = np.concatenate(list(converted(data, spec.dtype, dtype)))
        wide = np.concatenate(list(converted(kept, dtype, "float32"))).view(np.float32)
        if len(row) >= width > 0 and np.array_equal(wide, row[:width]):
            return True
    return False


def _in_words(how: str, wrong: list[str], compared: int) -> str | None:
    if not wrong:
        return None
    more = ", …" if len(wrong) > _NAMED else ""
    return f"{len(wrong)} of {compared} tensors {how}: {', '.join(wrong[:_NAMED])}{more}"
