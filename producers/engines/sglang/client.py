"""One SGLang server over HTTP: a coroutine per endpoint, each with a deadline, and three kinds of failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from producers.engines.remote.answers import Generated
from producers.engines.remote.http import (
    ASK_S,
    REQUEST_S,
    UPDATE_S,
    HttpClient,
    ServerBroken,
    ServerGone,
    ServerRefused,
    shortened,
)
from producers.engines.sglang.answers import Loads, generated_decoder, loads_decoder

__all__ = ["ServerBroken", "ServerGone", "ServerRefused", "SglangClient"]


class SglangClient(HttpClient):
    """Its key is the server's admin key."""

    async def generate(self, body: Mapping[str, Any], *, timeout_s: float = REQUEST_S) -> Generated:
        """One completion. Cancelling it has the server abort the request."""
        return self._decoded(generated_decoder, await self._post("/generate", body, timeout_s))

    async def abort_request(self, rid: str) -> None:
        """Unknown ids are ignored by the server."""
        await self._post("/abort_request", {"rid": rid}, ASK_S)

    async def pause_generation(self, mode: str) -> dict[str, Any]:
        """`mode`: "in_place", "retract" or "abort"."""
        return await self._told("/pause_generation", {"mode": mode})

    async def continue_generation(self) -> dict[str, Any]:
        return await self._told("/continue_generation", {})

    async def flush_cache(self, *, timeout_s: float = 0.0) -> None:
        """`timeout_s`: for which the server waits for running requests. Raises ServerRefused while there are any."""
        query = f"?timeout={timeout_s:g}" if timeout_s else ""
        await self._post(f"/flush_cache{query}", {}, ASK_S + timeout_s)

    async def update_weights_from_disk(
        self,
        *,
        model_path: str,
        weight_version: str | None = None,
        load_format: str | None = None,
        flush_cache: bool = False,
    ) -> dict[str, Any]:
        """Never aborts running requests. Raises ServerRefused where nothing was loaded."""
        body = {"model_path": model_path, "load_format": load_format, "weight_version": weight_version}
        return await self._update("/update_weights_from_disk", {**body, "flush_cache": flush_cache})

    async def update_weights_from_tensor(
        self,
        *,
        serialized_named_tensors: Sequence[str],
        weight_version: str | None = None,
        load_format: str | None = None,
        flush_cache: bool = False,
    ) -> dict[str, Any]:
        """`serialized_named_tensors`: base64, one text per tensor-parallel rank."""
        body = {"serialized_named_tensors": list(serialized_named_tensors), "load_format": load_format}
        label = {"weight_version": weight_version, "flush_cache": flush_cache}
        return await self._update("/update_weights_from_tensor", {**body, **label})

    async def begin_weight_update(self) -> dict[str, Any]:
        return await self._told("/begin_weight_update", {})

    async def end_weight_update(self) -> dict[str, Any]:
        return await self._told("/end_weight_update", {})

    async def init_weights_update_group(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> dict[str, Any]:
        body = {"master_address": master_address, "master_port": master_port, "rank_offset": rank_offset}
        body |= {"world_size": world_size, "group_name": group_name, "backend": backend}
        return await self._told("/init_weights_update_group", body)

    async def destroy_weights_update_group(self, *, group_name: str) -> dict[str, Any]:
        return await self._told("/destroy_weights_update_group", {"group_name": group_name})

    async def update_weights_from_distributed(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: str | None = None,
        weight_version: str | None = None,
        flush_cache: bool = False,
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"names": list(names), "dtypes": list(dtypes), "shapes": [list(one) for one in shapes]}
        body |= {"group_name": group_name, "load_format": load_format, "weight_version": weight_version}
        return await self._update("/update_weights_from_distributed", {**body, "flush_cache": flush_cache})

    async def update_weight_version(self, label: str) -> dict[str, Any]:
        """The label alone. Running requests go on."""
        return await self._told("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def weights_checker(
        self, *, action: str = "checksum", skip_tensor_list: Sequence[str] = ()
    ) -> dict[str, Any]:
        body = {"action": action, "skip_tensor_list": list(skip_tensor_list)}
        return await self._told("/weights_checker", body)

    async def get_weights_by_name(self, name: str, *, truncate_size: int) -> Any:
        return await self._json("POST", "/get_weights_by_name", {"name": name, "truncate_size": truncate_size})

    async def model_info(self, *, timeout_s: float = ASK_S) -> dict[str, Any]:
        """Answered without the scheduler: the server's process lives, and this is the label of its weights."""
        return await self._object("GET", "/model_info", None, timeout_s)

    async def server_info(self, *, timeout_s: float = ASK_S) -> dict[str, Any]:
        """Start-up arguments and the scheduler's state: answered between two steps of the scheduler."""
        return await self._object("GET", "/server_info", None, timeout_s)

    async def loads(self, *, timeout_s: float = ASK_S) -> Loads:
        return self._decoded(loads_decoder, await self._call("GET", "/v1/loads?include=core", None, timeout_s))

    async def _update(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Loads weights. Never aborts what runs, which a server may do by itself where it is not told."""
        return await self._told(path, {**body, "abort_all_requests": False})

    async def _told(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """An order. Some answer 200 with success = false."""
        answer = await self._json("POST", path, body, UPDATE_S)
        if not isinstance(answer, dict):
            return {}
        if answer.get("success") is False:
            raise ServerRefused(shortened(str(answer.get("message", answer))), 200)
        return answer
