"""What a completion server says of how it runs. There is no standard for it: read is what vLLM, or SGLang, tells.

vLLM tells of its cache on `/metrics`, and of the rest on `/server_info` where it runs with VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

from producers.engines.openai.client import CompletionsClient
from producers.engines.remote.http import ServerBroken, ServerRefused
from producers.engines.sglang import traits as sglang
from producers.engines.traits import UNTOLD, Trait, Traits

COMPOSED = ("TORCH_SDPA",)
"""Attention backends of vLLM that are torch's own."""
_CACHE = re.compile(r"^vllm:cache_config_info\{(.*)\} 1", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')

T = TypeVar("T")


async def ask(client: CompletionsClient) -> Traits:
    """Of a server; what it does not answer is unknown. Raises ServerGone."""
    info: dict[str, Any] = await _told(client.server_info(), {})
    version: dict[str, Any] = await _told(client.server_version(), {})
    return traits(info, str(version.get("version") or ""), await _told(client.metrics(), ""))


async def _told(answer: Awaitable[T], nothing: T) -> T:
    try:
        return await answer
    except (ServerRefused, ServerBroken):  # it has no such route, or another server's
        return nothing


def traits(info: Mapping[str, Any], version: str, metrics: str) -> Traits:
    """From the answers of `/server_info`, `/version` and `/metrics`; empty where there is none."""
    if "attention_backend" in info:
        return sglang.traits(info)
    config, environ = _dict(info, "vllm_config"), _dict(info, "vllm_env")
    cache = _CACHE.search(metrics)
    if not config and not environ and cache is None:
        return Traits("", "")
    device = str(_dict(config, "device_config").get("device_type") or "")
    attention = _dict(config, "attention_config").get("backend") or environ.get("VLLM_ATTENTION_BACKEND")
    return Traits(
        device=device,
        software=f"vLLM {version}".strip(),
        native_backend=Trait(True, f"vLLM's for {device}") if device else UNTOLD,
        attention_kernel=_kernel(str(attention or "").rpartition(".")[2]),
        paged_cache=_cache(dict(_LABEL.findall(cache[1])) if cache is not None else {}),
    )


def _kernel(attention: str) -> Trait:
    if not attention:
        return UNTOLD
    return Trait(attention not in COMPOSED, attention)


def _cache(labels: Mapping[str, str]) -> Trait:
    size = labels.get("block_size", "")
    if not size.isdigit():
        return UNTOLD
    prefixes = ", prefixes shared" if labels.get("enable_prefix_caching", "").lower() == "true" else ""
    return Trait(True, f"blocks of {size} tokens{prefixes}")


def _dict(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = tree.get(name)
    return found if isinstance(found, dict) else {}
