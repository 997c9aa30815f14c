"""What an SGLang server says of how it runs: from `/server_info` and the arguments of its start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from producers.engines.traits import UNTOLD, Trait, Traits

FLAG = "--attention-backend"
COMPOSED = {
    "torch_native": "torch_native: torch's own attention, one request after the other",
    "flex_attention": "flex_attention: torch's own attention under a mask, compiled where the device can",
}
"""Attention backends that are no kernels of SGLang, or of a library for it."""
KERNELS = (
    *("triton", "fa3", "fa4", "flashinfer", "llada2_cfg_flashinfer", "flashmla", "trtllm_mla", "trtllm_mha"),
    *("cutedsl_mla", "cutlass_mla", "tokenspeed_mla", "minicpm_flashattn", "minicpm_flashinfer", "dsa", "nsa", "qsa"),
    *("dsv4", "compressed", "aiter", "wave", "intel_amx", "intel_xpu", "ascend"),
)
OWN = {"cpu": ("intel_amx",), "npu": ("ascend",), "xpu": ("intel_xpu", "triton")}
"""Devices beside CUDA's to the attention backends that show that SGLang has operations of its own for them there."""


def traits(info: Mapping[str, Any], args: Sequence[str] = ()) -> Traits:
    """`info`: the answer; `args`: those that the server was started with, where headrace has started it."""
    device = str(info.get("device") or "").partition(":")[0]
    version = str(info.get("version") or "")
    attention = _attention(info, args)
    return Traits(
        device=device,
        software=f"SGLang {version}".strip(),
        native_backend=_native(device, attention),
        attention_kernel=_kernel(attention),
        paged_cache=_cache(info),
    )


def _attention(info: Mapping[str, Any], args: Sequence[str]) -> str:
    """The name of what decoding attends with; "" where nobody tells."""
    told = info.get("decode_attention_backend") or info.get("attention_backend")
    if told:
        return str(told)
    for place, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name == FLAG:
            return value if equals else "".join(args[place + 1 : place + 2])
    return ""


def _native(device: str, attention: str) -> Trait:
    if device == "cuda":
        return Trait(True, "SGLang's kernels for CUDA or ROCm")
    if device not in OWN or not attention:
        return UNTOLD
    if attention in OWN[device]:
        return Trait(True, f"SGLang's kernels for {device}")
    return Trait(False, f"on {device} SGLang's own attention is {OWN[device][0]}; it runs {attention}")


def _kernel(attention: str) -> Trait:
    if attention in COMPOSED:
        return Trait(False, COMPOSED[attention])
    return Trait(True, attention) if attention in KERNELS else Trait(None, attention or UNTOLD.what)


def _cache(info: Mapping[str, Any]) -> Trait:
    page = info.get("page_size")
    if not isinstance(page, int) or page < 1:
        return UNTOLD
    tokens = "token" if page == 1 else "tokens"
    prefixes = "" if info.get("disable_radix_cache") else ", prefixes shared"
    return Trait(True, f"pages of {page} {tokens}{prefixes}")
