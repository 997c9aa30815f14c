"""By what means an SGLang server's weights can be updated: its routes, and what it says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from headrace.errors import ConfigError
from producers.engines.remote.digesting import CHECKSUMS
from producers.engines.remote.spans import Kv
from producers.engines.remote.staged import Staged
from producers.engines.remote.updating import SLOWEST, Way, on_this_host
from producers.engines.sglang.client import SglangClient
from weightsync.manifest import DTYPE_BYTES

MeansName = Literal["auto", "folder", "collective", "tensor"]

PAUSES: dict[Kv, str] = {"keep": "in_place", "recompute": "retract", "resume": "abort"}
"""How a server pauses, by what becomes of the keys and values of its running requests."""
_SESSION = ("/begin_weight_update", "/end_weight_update")
_NEEDS: dict[str, tuple[str, ...]] = {
    "folder": ("/update_weights_from_disk",),
    "collective": ("/init_weights_update_group", "/destroy_weights_update_group", "/update_weights_from_distributed"),
    "tensor": ("/update_weights_from_tensor",),
}
"""The best first."""
SLOWEST_BY = {"folder": SLOWEST, "collective": 20 << 20, "tensor": 2 << 20}
"""Bytes per second that an update may be slow. Seen on two busy cores: 350, 200, 15 MB/s."""


class Means(Protocol):
    """One way by which the bytes come into a server."""

    name: str

    async def prepare(self, client: SglangClient, staged: Staged) -> None:
        """What can be done while the server decodes. Raises UpdateFailed, or what the client raises."""
        ...

    async def load(self, client: SglangClient, staged: Staged, label: str, way: Way) -> None:
        """Load all of a sealed version into a server that is paused; its label goes with the last of it.

        Sets `way.touched` before the server can have loaded anything. Raises UpdateFailed, or what the client raises.
        """
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a server can do, as it says itself."""

    routes: frozenset[str]
    version: str
    tp_size: int
    dp_size: int
    overlap_schedule: bool
    same_host: bool
    dtype: str
    """"bfloat16", "float16", "float32", or "auto" where it does not say."""
    device: str
    """"cpu" or "cuda"."""
    load_format: str = "auto"

    @property
    def sessions(self) -> bool:
        """Whether tensors are taken only between a begin and an end."""
        return all(route in self.routes for route in _SESSION)

    def lacks(self, means: str) -> str | None:
        """Why these means cannot be used, or None."""
        missing = [route for route in _NEEDS[means] if route not in self.routes]
        if missing:
            return f"this server (SGLang {self.version}) has no {missing[0]}"
        if means == "folder" and not self.same_host:
            return "the server runs on another host"
        if means != "folder" and self.dp_size > 1:
            return f"the server runs {self.dp_size} data-parallel copies, which take no single tensors"
        return None


async def capabilities(client: SglangClient, info: Mapping[str, Any] | None = None) -> Capabilities:
    """Ask the server. `info` is what it says of itself, where that is known. Raises what the client raises."""
    routes = frozenset((await client.openapi()).get("paths", {}))
    if info is None:
        info = await client.server_info()
    return described(routes, info, same_host=on_this_host(client.url))


def described(routes: frozenset[str], info: Mapping[str, Any], *, same_host: bool) -> Capabilities:
    """From what it answers for its start-up arguments; absent ones are as SGLang's defaults."""
    dtype = str(info.get("dtype") or "auto")
    dtype = {"half": "float16", "float": "float32"}.get(dtype, dtype)
    device = str(info.get("device") or "cuda").partition(":")[0]
    return Capabilities(
        routes=routes,
        version=str(info.get("version") or "unknown"),
        tp_size=int(info.get("tp_size") or 1),
        dp_size=int(info.get("dp_size") or 1),
        overlap_schedule=not info.get("disable_overlap_schedule"),
        same_host=same_host,
        dtype=dtype if dtype in DTYPE_BYTES else "auto",
        device=device if device in CHECKSUMS else "cuda",
        load_format=str(info.get("load_format") or "auto"),
    )


def candidates(means: MeansName, found: Capabilities) -> list[str]:
    """The means that may be tried, the best first. Raises ConfigError when there are none."""
    if means != "auto":
        if reason := found.lacks(means):
            raise ConfigError(f'weights cannot come to the server by means = "{means}": {reason}; set means = "auto"')
        return [means]
    reasons = {name: found.lacks(name) for name in _NEEDS}
    usable = [name for name, reason in reasons.items() if reason is None]
    if not usable:
        said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise ConfigError(f"this server's weights cannot be updated ({said}); use SGLang 0.5.6 or newer")
    return usable


def refuse_mode(kv: Kv, found: Capabilities) -> None:
    """Raises ConfigError where the server cannot pause in that way without a wrong token."""
    if "/pause_generation" not in found.routes:
        raise ConfigError(f"this server (SGLang {found.version}) cannot pause; use SGLang 0.5.6 or newer")
    if kv == "keep" and found.overlap_schedule:
        raise ConfigError(
            'kv = "keep" needs a server without its overlap schedule, which would book a token of the old weights to '
            'the new version; start it with --disable-overlap-schedule, or set kv = "recompute"'
        )
