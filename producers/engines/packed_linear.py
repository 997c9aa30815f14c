"""Linear layers with weights packed for oneDNN, where that is faster: bfloat16 on a CPU.

A packed weight is a copy in oneDNN's own order, so it is made anew for each weight version, while decoding goes on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build of torch packs weights of `dtype` on `device`."""
    on_cpu = device.type == "cpu" and dtype == torch.bfloat16 and torch._C._has_mkldnn
    return bool(on_cpu and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A packed copy of a weight [out, in]; takes about a millisecond per megabyte."""
    with torch.inference_mode():
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        return packed


class PackedLinears:
    """All plain `torch.nn.Linear` modules of a model, computed with packed weights that are swapped as a whole."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.modules = [module for module in model.modules() if type(module) is torch.nn.Linear]
        self._weights: list[torch.Tensor] = []
        for index, module in enumerate(self.modules):
            module.forward = self._forward(index, module)  # type: ignore[assignment, method-assign]

    def swap(self, packed: list[torch.Tensor]) -> None:
        """Use these from the next forward pass on; one per module of `modules`, in order.

        Afterwards `packed` holds those used so far: to free them takes as long as they are large.
        """
        assert len(packed) == len(self.modules)
        self._weights[:], packed[:] = packed, self._weights[:]

    def _forward(self, index: int, module: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        weights = self._weights
        linear = torch.ops.mkldnn._linear_pointwise

        def forward(x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = linear(x, weights[index], module.bias, "none", [], "")
            return out

        return forward
