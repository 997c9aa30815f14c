"""The engine's weights: a front that decoding reads, a back in which the next version is staged.

Both are flat buffers in the layout of the wire; parameters are views into the front, so that a swap moves pointers
and no bytes. Where the engine computes in another dtype or on another device, the staged bytes are converted into a
second pair of buffers. Conversion and packing happen in `prepare`, while decoding goes on, and so does freeing what
was replaced; `swap`, which is what happens at the boundary between two steps, takes a time that depends on the number
of tensors only.

What is packed (`packed_linear.py`) is computed with from that copy alone. Its pages of the flat buffer go back to
the system at once, so that such an engine needs two models' memory while it stages, as any other, and not four.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from headrace.errors import WeightError
from headrace.policy.loading import layout_of
from producers.engines.kv_pages import PRIVATE
from producers.engines.packed_linear import PackedLinears, can_pack, pack
from weightsync.manifest import Layout, TensorSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True, eq=False)
class _Prepared:
    views: list[torch.Tensor]
    packed: list[torch.Tensor]
    """After the swap, those that were replaced."""
    flat: _Flat | None
    """What the views are of; after the swap, what was replaced and is of no more use."""

    def free(self) -> None:
        """Free what the swap replaced. Any thread."""
        self.views, self.flat = [], None
        while self.packed:
            self.packed.pop()  # one by one: the decode thread waits for the interpreter meanwhile


class _Flat:
    """A flat buffer whose pages can be given back, where it is anonymous memory of our own."""

    def __init__(self, nbytes: int, device: torch.device, *, own: bool) -> None:
        self.ours = True
        """It may be written into."""
        self._memory = mmap.mmap(-1, nbytes, flags=PRIVATE) if own else None
        if self._memory is not None:
            self.data = torch.frombuffer(self._memory, dtype=torch.uint8)
        else:
            self.data = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    @classmethod
    def around(cls, data: torch.Tensor) -> _Flat:
        """Bytes that are there, and whose memory is their own."""
        made = cls.__new__(cls)
        made._memory, made.data, made.ours = None, data, False
        return made

    def discard(self, spec: TensorSpec) -> None:
        """Give back the pages that only this tensor has; they read as zeros afterwards."""
        page = mmap.PAGESIZE
        first, end = -(-spec.offset // page) * page, spec.end // page * page
        if self._memory is not None and end > first:
            self._memory.madvise(mmap.MADV_DONTNEED, first, end - first)


class EngineWeights:
    """Owns all parameters of `model` (in evaluation mode, on its device) from now on."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = [parameter for _, parameter in model.named_parameters()]
        self._places = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        first = self._parameters[0]
        self._dtype, self._device = first.dtype, first.device
        name = next(name for name, dtype in DTYPES.items() if dtype == self._dtype)
        self._layout = Layout.of(layout_of(model, name))
        self._back: _Flat | None = None
        self._staging: tuple[Layout, torch.Tensor] | None = None
        self._converted: tuple[Layout, torch.Tensor] | None = None
        """What versions are staged into that `prepare` converts; kept, as freeing it takes as long as it is large."""
        self._prepared: _Prepared | None = None
        """What was staged, once it is packed: its flat bytes are gone then."""
        self._linears = PackedLinears(model) if can_pack(self._dtype, self._device) else None
        self._only_packed = _only_packed(model, self._linears)
        self._front = self._buffer()
        views = self._views(self._front)
        with torch.no_grad():
            for view, parameter in zip(views, self._parameters, strict=True):
                view.copy_(parameter)
        self._swap(self._pack(self._front, views))

    @property
    def staged(self) -> bool:
        """A back buffer was handed out since the last swap."""
        return self._staging is not None

    def stage(self, layout: Layout) -> npt.NDArray[np.uint8]:
        """The bytes [layout.nbytes] that the next version is written into. Raises WeightError for another model's."""
        self._check(layout)
        self._prepared = None
        if self._staging is None or self._staging[0] != layout:
            if self._back is None:
                self._back = self._buffer()
            self._staging = (layout, self._back.data) if self._direct(layout) else self._to_convert(layout)
        array: npt.NDArray[np.uint8] = self._staging[1].numpy()
        return array

    def map(self, layout: Layout, data: npt.NDArray[np.uint8]) -> None:
        """The next version lies in `data` [layout.nbytes], which does not change. Where it needs no conversion it is
        decoded from as it is. Raises WeightError for another model's.
        """
        self._check(layout)
        self._prepared = None
        self._staging = layout, torch.from_numpy(data)

    def prepare(self) -> _Prepared:
        """Convert and pack what was staged. Any thread, but always the same one: what glibc frees there, it uses there
        again. Takes as long as it takes; asked again without a new version, it gives the same."""
        if self._prepared is not None:
            return self._prepared
        assert self._staging is not None
        layout, buffer = self._staging
        if self._direct(layout):
            flat = self._back if self._back is not None and self._back.data is buffer else _Flat.around(buffer)
            views = self._views(flat)
        else:
            flat = self._back = self._back or self._buffer()
            views = self._views(flat)
            for view, spec in zip(views, layout.tensors, strict=True):
                view.copy_(_view(buffer, spec))
        self._prepared = self._pack(flat, views)
        return self._prepared

    def swap(self, prepared: _Prepared) -> None:
        """Make the prepared version the front, and the old front the back. Between two steps only."""
        assert prepared.flat is not None
        self._swap(prepared)
        before = self._front
        self._front = prepared.flat
        if self._front is self._back:
            self._back = None
        prepared.flat = None if before.ours else before
        if before.ours:
            self._back = before
        self._staging = self._prepared = None

    def _direct(self, layout: Layout) -> bool:
        """Whether bytes of this layout can be computed with as they are."""
        return layout == self._layout and self._device.type == "cpu"

    def _buffer(self) -> _Flat:
        return _Flat(self._layout.nbytes, self._device, own=self._linears is not None)

    def _to_convert(self, layout: Layout) -> tuple[Layout, torch.Tensor]:
        if self._converted is None or self._converted[0] != layout:
            self._converted = layout, torch.zeros(layout.nbytes, dtype=torch.uint8)
        return self._converted

    def _swap(self, prepared: _Prepared) -> None:
        for parameter, view in zip(self._parameters, prepared.views, strict=True):
            parameter.data = view
        if self._linears is not None:
            self._linears.swap(prepared.packed)

    def _views(self, buffer: _Flat) -> list[torch.Tensor]:
        return [_view(buffer.data, spec) for spec in self._layout.tensors]

    def _pack(self, buffer: _Flat, views: list[torch.Tensor]) -> _Prepared:
        """Of `views` into `buffer`. What is only used packed is not there any more afterwards, and reads as NaN."""
        if self._linears is None:
            return _Prepared(views, [], buffer)
        packed = []
        for module in self._linears.modules:
            place = self._places[id(module.weight)]
            packed.append(pack(views[place]))
            if place in self._only_packed:
                buffer.discard(self._layout.tensors[place])
                views[place] = torch.full((), torch.nan, dtype=self._dtype).expand(views[place].shape)
        return _Prepared(views, packed, buffer)

    def _check(self, layout: Layout) -> None:
        ours, theirs = self._layout.tensors, layout.tensors
        for mine, other in zip(ours, theirs, strict=False):
            if (mine.name, mine.shape) != (other.name, other.shape) or other.dtype not in DTYPES:
                raise WeightError(
                    f"the staged version holds {other.name} as {other.dtype} {list(other.shape)} where the engine's "
                    f"model has {mine.name} {list(mine.shape)}; both must be of one model"
                )
        if len(ours) != len(theirs):
            raise WeightError(
                f"the staged version holds {len(theirs)} tensors where the engine's model has {len(ours)}; "
                "both must be of one model"
            )


def _only_packed(model: torch.nn.Module, linears: PackedLinears | None) -> set[int]:
    """Places in `model.parameters()` of those weights that nothing reads but linear layers that are packed."""
    if linears is None:
        return set()
    packed = {id(module) for module in linears.modules}
    read = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if id(module) not in packed or name != "weight"
    }
    weights = {id(module.weight) for module in linears.modules}
    return {place for place, one in enumerate(model.parameters()) if id(one) in weights - read}


def _view(buffer: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    return buffer[spec.offset : spec.offset + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape)
