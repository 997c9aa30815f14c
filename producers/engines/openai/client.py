"""One completion server over HTTP. What is vLLM's own, and no standard, is said to be so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from producers.engines.openai.answers import Completed, Models, completed_decoder, models_decoder
from producers.engines.remote.http import ASK_S, REQUEST_S, UPDATE_S, HttpClient, ServerBroken, ServerRefused


class CompletionsClient(HttpClient):
    """Its key is the API key."""

    async def complete(self, body: Mapping[str, Any], *, timeout_s: float = REQUEST_S) -> Completed:
        """One completion. Cancelling it has the server abort the request."""
        return self._decoded(completed_decoder, await self._post("/v1/completions", body, timeout_s))

    async def models(self, *, timeout_s: float = ASK_S) -> Models:
        return self._decoded(models_decoder, await self._call("GET", "/v1/models", None, timeout_s))

    async def health(self, *, timeout_s: float = ASK_S) -> None:
        """Raises where the server's process, or what it computes with, is at its end."""
        try:
            await self._call("GET", "/health", None, timeout_s)
        except ServerRefused:
            # It has no such route.
            await self.models(timeout_s=timeout_s)

    async def server_info(self, *, timeout_s: float = ASK_S) -> dict[str, Any]:
        """vLLM's, and SGLang's: how it was started."""
        return await self._object("GET", "/server_info?config_format=json", None, timeout_s)

    async def server_version(self, *, timeout_s: float = ASK_S) -> dict[str, Any]:
        """vLLM's."""
        return await self._object("GET", "/version", None, timeout_s)

    async def metrics(self, *, timeout_s: float = ASK_S) -> str:
        """In the text format of Prometheus."""
        return (await self._call("GET", "/metrics", None, timeout_s)).decode("utf-8", "replace")

    async def abort_requests(self, ids: list[str]) -> None:
        """vLLM's: their answers come with what they have. Unknown ids are ignored by the server."""
        await self._post("/abort_requests", {"request_ids": ids}, ASK_S)

    async def is_paused(self, *, timeout_s: float = ASK_S) -> bool:
        """vLLM's."""
        return bool((await self._object("GET", "/is_paused", None, timeout_s)).get("is_paused"))

    async def pause(self) -> None:
        """vLLM's: running requests are answered with what they have, new ones wait, the prefix cache is emptied."""
        await self._post("/pause?mode=abort&clear_cache=true", None, UPDATE_S)

    async def resume(self) -> None:
        """vLLM's."""
        await self._post("/resume", None, UPDATE_S)

    async def reload_weights(self, folder: str) -> None:
        """vLLM's: load the model's tensors from a folder of the server's machine."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await self._post("/collective_rpc", body, UPDATE_S)

    async def weight_version(self, *, timeout_s: float = ASK_S) -> str:
        """vLLM's label of its weights. Answered between two steps of its scheduler."""
        return str((await self._object("GET", "/weight_info", None, timeout_s)).get("weight_version", ""))

    async def update_weight_version(self, label: str) -> None:
        """vLLM's: the label alone."""
        await self._post("/update_weight_version", {"new_version": label}, UPDATE_S)

    async def weight_checksums(self) -> dict[str, str]:
        """vLLM's: SHA-256 of the bytes of each tensor, by rank and name, as "dp0:pp0:pcp0:tp0:model.norm.weight"."""
        answer = await self._json("POST", "/weight_checker", {"action": "checksum"}, UPDATE_S)
        found = answer.get("checksums") if isinstance(answer, dict) else None
        if not isinstance(found, dict):
            raise ServerBroken(f"{self.url}/weight_checker answered no checksums")
        return {str(name): str(value) for name, value in found.items()}
