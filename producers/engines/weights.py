"""The engine's weights: a front that decoding reads, a back in which the next version is staged.

Both are flat buffers in the layout of the wire; parameters are views into the front, so that a swap moves pointers
and no bytes. Where the engine computes in another dtype or on another device, the staged bytes are converted into a
second pair of buffers. Conversion and packing happen in `prepare`, while decoding goes on, and so does freeing what
was replaced; `swap`, which is what happens at the boundary between two steps, takes a time that depends on the number
of tensors only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from headrace.errors import WeightError
from headrace.policy.loading import layout_of
from producers.engines.packed_linear import PackedLinears, can_pack, pack
from weightsync.manifest import Layout, TensorSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    views: list[torch.Tensor]
    packed: list[torch.Tensor]
    """After the swap, those that were replaced."""

    def free(self) -> None:
        """Free what the swap replaced. Any thread."""
        while self.packed:
            self.packed.pop()  # one by one: the decode thread waits for the interpreter meanwhile


class EngineWeights:
    """Owns all parameters of `model` (in evaluation mode, on its device) from now on."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = [parameter for _, parameter in model.named_parameters()]
        self._places = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        first = self._parameters[0]
        self._dtype, self._device = first.dtype, first.device
        name = next(name for name, dtype in DTYPES.items() if dtype == self._dtype)
        self._layout = Layout.of(layout_of(model, name))
        self._front = torch.zeros(self._layout.nbytes, dtype=torch.uint8, device=self._device)
        self._back: torch.Tensor | None = None
        self._staging: tuple[Layout, torch.Tensor] | None = None
        self._converted: tuple[Layout, torch.Tensor] | None = None
        """What versions are staged into that `prepare` converts; kept, as freeing it takes as long as it is large."""
        self._linears = PackedLinears(model) if can_pack(self._dtype, self._device) else None
        views = self._views(self._front)
        with torch.no_grad():
            for view, parameter in zip(views, self._parameters, strict=True):
                view.copy_(parameter)
        self._swap(_Prepared(views, self._pack(views)))

    @property
    def staged(self) -> bool:
        """A back buffer was handed out since the last swap."""
        return self._staging is not None

    def stage(self, layout: Layout) -> npt.NDArray[np.uint8]:
        """The bytes [layout.nbytes] that the next version is written into. Raises WeightError for another model's."""
        self._check(layout)
        if self._staging is None or self._staging[0] != layout:
            if self._back is None:
                self._back = torch.zeros_like(self._front)
            direct = layout == self._layout and self._device.type == "cpu"
            self._staging = (layout, self._back) if direct else self._to_convert(layout)
        array: npt.NDArray[np.uint8] = self._staging[1].numpy()
        return array

    def prepare(self) -> _Prepared:
        """Convert and pack what was staged. Any thread; takes as long as it takes."""
        assert self._staging is not None
        assert self._back is not None
        layout, buffer = self._staging
        views = self._views(self._back)
        if buffer.data_ptr() != self._back.data_ptr():
            for view, spec in zip(views, layout.tensors, strict=True):
                view.copy_(_view(buffer, spec))
        return _Prepared(views, self._pack(views))

    def swap(self, prepared: _Prepared) -> None:
        """Make the prepared version the front, and the old front the back. Between two steps only."""
        assert self._back is not None
        self._swap(prepared)
        self._front, self._back = self._back, self._front
        self._staging = None

    def _to_convert(self, layout: Layout) -> tuple[Layout, torch.Tensor]:
        if self._converted is None or self._converted[0] != layout:
            self._converted = layout, torch.zeros(layout.nbytes, dtype=torch.uint8)
        return self._converted

    def _swap(self, prepared: _Prepared) -> None:
        for parameter, view in zip(self._parameters, prepared.views, strict=True):
            parameter.data = view
        if self._linears is not None:
            self._linears.swap(prepared.packed)

    def _views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return [_view(buffer, spec) for spec in self._layout.tensors]

    def _pack(self, views: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._linears is None:
            return []
        with torch.inference_mode():
            return pack(views[self._places[id(module.weight)]] for module in self._linears.modules)

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


def _view(buffer: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    return buffer[spec.offset : spec.offset + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape)
