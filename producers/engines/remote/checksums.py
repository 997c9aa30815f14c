"""Whether a server computes with what was staged: its own checksums against those of the staged bytes.

A server answers success for a version of which it loaded a part, or nothing: names that it does not know are passed
over. So after each update it is asked for the checksum of each of its tensors, which are of a form of its own
(`forms.py`). A server that computes no checksums is asked for the first row of each tensor instead.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from headrace.errors import WeightError
from producers.engines.remote.digesting import CHECKSUMS, converted
from producers.engines.remote.forms import Comparable, Form, Shard, made
from producers.engines.remote.staged import Staged
from weightsync.manifest import DTYPE_BYTES, Layout, TensorSpec

log = logging.getLogger(__name__)

Verify = Literal["all", "sample"]
"""How much of an update is compared: every tensor, or another eighth of them after each update."""

SAMPLES = 8
_NAMED = 3
"""So many tensors that differ are named."""


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

    async def fault(self, staged: Staged, *, whole: bool) -> str | None:
        """How the server's weights differ from the staged version, or None. `whole` compares all tensors. Raises what
        the client raises."""
        ...


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank of a server answers."""

    checksums: Mapping[str, str]
    """Of its part of each tensor, by the server's names."""
    shard: Shard

    def of(self, found: Comparable) -> str:
        return self.checksums[found.name]


AsksRanks = Callable[[Sequence[str]], Awaitable[list[Rank]]]
"""Asks a server for its checksums, without those of some tensors. Raises what the client raises."""
AsksRow = Callable[[str], Awaitable[Any]]
"""Asks a server for a tensor's first row: numbers, or None for a tensor that it has not."""


class ChecksumChecker:
    """By the checksums that the server computes."""

    def __init__(
        self, layout: Layout, ask: AsksRanks, ranks: Sequence[Rank], *, device: str, dtype: str, sample: bool
    ) -> None:
        """`ranks` is what the server answered once: the names of its tensors. `dtype` is the likely one."""
        self._ask = ask
        self._checksum = CHECKSUMS[device]
        self._names = {name for rank in ranks for name in rank.checksums}
        self._found = {one.name: one for one in made(layout, sorted(self._names))}
        self._forms: dict[str, Form] = {}
        self._dtype = dtype
        self._shards = {rank.shard for rank in ranks}
        self._turn = 0
        self._sample = sample
        loaded = {spec.name for one in self._found.values() for spec in one.sources}
        self.unknown = [spec.name for spec in layout.tensors if spec.name not in loaded]
        """On the wire, and in no tensor of the server: its loader would pass them over."""

    @property
    def what(self) -> str:
        count = len(self._found)
        share = f", an eighth of {count} tensors in turn" if self._sample else f" of {count} tensors"
        left = f"; {len(self.unknown)} of the version's cannot be compared" if self.unknown else ""
        return f"the server's checksums{share}{left}"

    def prepare(self, staged: Staged) -> None:
        for name in self._due(whole=False):
            if name in self._forms:
                for shard in self._shards:
                    self._expected(staged, self._found[name], self._forms[name], shard)

    async def fault(self, staged: Staged, *, whole: bool) -> str | None:
        due = self._due(whole=whole)
        ranks = await self._ask(sorted(self._names - due))
        self._turn += 1
        wrong = await asyncio.to_thread(self._wrong, staged, ranks, due)
        return _in_words("have other checksums than the staged ones", wrong, len(due))

    def _due(self, *, whole: bool) -> set[str]:
        if whole or not self._sample:
            return set(self._found)
        turn = self._turn % SAMPLES
        return {name for name in self._found if zlib.crc32(name.encode()) % SAMPLES == turn}

    def _wrong(self, staged: Staged, ranks: Sequence[Rank], due: set[str]) -> list[str]:
        """Names of tensors. The smallest are compared first: they tell the dtype for little."""
        found = sorted((self._found[name] for name in due), key=lambda one: one.nbytes)
        wrong = [one for one in found if not self._right(staged, one, ranks)]
        strange = self._strange(wrong, ranks)
        for one in strange:
            del self._found[one.name]
        if strange:
            log.warning(
                "%d tensors are split among the server's ranks in a way that is not known here, so not compared: %s",
                len(strange), _named([one.name for one in strange]),
            )  # fmt: skip
        return [one.name for one in wrong if one not in strange]

    def _strange(self, wrong: Sequence[Comparable], ranks: Sequence[Rank]) -> list[Comparable]:
        """Of a server of several ranks: those of which none in any layer was ever right. Norms are always known."""
        if all(rank.shard.ranks == 1 for rank in ranks):
            return []
        known = {self._found[name].kind for name in self._forms}
        return [one for one in wrong if known and not one.norm and one.kind not in known]

    def _right(self, staged: Staged, found: Comparable, ranks: Sequence[Rank]) -> bool:
        """Stages of a pipeline have each their own."""
        having = [rank for rank in ranks if found.name in rank.checksums]
        known = self._forms.get(found.name)
        for form in [known] if known else found.forms(self._dtype, max(rank.shard.ranks for rank in ranks)):
            if having and all(self._expected(staged, found, form, rank.shard) == rank.of(found) for rank in having):
                self._forms[found.name] = form
                self._dtype = form.dtype
                return True
        return False

    def _expected(self, staged: Staged, found: Comparable, form: Form, shard: Shard) -> str:
        """Computed once per version, for all servers that it goes to."""
        key = (found.name, form, None if form.split == "whole" else shard, self._checksum)
        if key not in staged.computed:
            staged.computed[key] = self._checksum(found.bytes(staged, form, shard))
        return staged.computed[key]


class RowChecker:
    """By the first row of each tensor: for a server that computes no checksums."""

    unknown: Sequence[str] = ()

    def __init__(self, layout: Layout, ask: AsksRow, why: str, *, sample: bool) -> None:
        self._specs = layout.tensors
        self._ask, self._why = ask, why
        self._turn = 0
        self._sample = sample

    @property
    def what(self) -> str:
        return f"only the first row of each tensor, as this server computes no checksums ({self._why})"

    def prepare(self, staged: Staged) -> None:
        pass

    async def fault(self, staged: Staged, *, whole: bool) -> str | None:
        turn = self._turn % SAMPLES
        self._turn += 1
        specs = [spec for at, spec in enumerate(self._specs) if whole or not self._sample or at % SAMPLES == turn]
        wrong = [spec.name for spec in specs if not same_row(staged, spec, await self._ask(spec.name))]
        return _in_words("have another first row than the staged ones", wrong, len(specs))


def checksums_of(answer: Mapping[str, Any]) -> list[Rank]:
    """Of /weights_checker. Raises WeightError for an answer that is none."""
    try:
        return [_rank(rank) for rank in answer["ranks"]]
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise WeightError(f"what the server answers for its checksums is not understood: {error!r}") from error


def _rank(answer: Mapping[str, Any]) -> Rank:
    info = answer.get("parallelism_info") or {}
    # A list where a second model decodes speculatively; the first is the model itself.
    info = info[0] if isinstance(info, list) else info
    checksums = {str(name): str(value) for name, value in answer["checksums"].items()}
    return Rank(checksums, Shard(int(info.get("tp_rank", 0)), int(info.get("tp_size", 1))))


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


def _in_words(how: str, wrong: Sequence[str], compared: int) -> str | None:
    if not wrong:
        return None
    return f"{len(wrong)} of {compared} tensors {how}: {_named(wrong)}"


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
