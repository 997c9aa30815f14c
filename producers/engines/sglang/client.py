"""One SGLang server over HTTP: a coroutine per endpoint, each with a deadline, and three kinds of failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
import msgspec

from headrace.errors import EngineError
from producers.engines.sglang.answers import Generated, Loads, generated_decoder, loads_decoder

ASK_S = 30.0
"""For what a server answers out of hand; its scheduler may be in the middle of a long prefill."""
UPDATE_S = 600.0
"""For what moves weights; the callers have deadlines of their own, by the size."""
REQUEST_S = 3600.0
"""For one completion; whether the server goes on is watched meanwhile."""
KEEP_ALIVE_S = 2.0
"""Servers close an idle connection after 5 s: one that is about to be closed must not be taken for a request."""
_MOST_TEXT = 500

T = TypeVar("T")


class ServerGone(EngineError):
    """The server cannot be reached, has dropped the connection, or has not answered in time."""


class ServerBroken(EngineError):
    """The server failed: it answered 5xx, or what nobody can read."""


class ServerRefused(EngineError):
    """The server does not do what it was asked for (4xx, or success = false); its text is the server's message."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class SglangClient:
    """For one event loop. Every call raises ServerGone, ServerBroken or ServerRefused."""

    def __init__(self, url: str, admin_key: str = "") -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> SglangClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def url(self) -> str:
        return self._url

    async def close(self) -> None:
        """Requests that are open end with ServerGone. Idempotent."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

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
        return await self._told("/init_weights_update_group", body, UPDATE_S)

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
        return await self._told("/weights_checker", body, UPDATE_S)

    async def get_weights_by_name(self, name: str, *, truncate_size: int) -> Any:
        return await self._json("POST", "/get_weights_by_name", {"name": name, "truncate_size": truncate_size})

    async def model_info(self, *, timeout_s: float = ASK_S) -> dict[str, Any]:
        """Answered without the scheduler: the server's process lives, and this is the label of its weights."""
        found: dict[str, Any] = await self._json("GET", "/model_info", None, timeout_s)
        return found

    async def server_info(self, *, timeout_s: float = ASK_S) -> dict[str, Any]:
        """Start-up arguments and the scheduler's state: answered between two steps of the scheduler."""
        found: dict[str, Any] = await self._json("GET", "/server_info", None, timeout_s)
        return found

    async def loads(self, *, timeout_s: float = ASK_S) -> Loads:
        return self._decoded(loads_decoder, await self._call("GET", "/v1/loads?include=core", None, timeout_s))

    async def openapi(self) -> dict[str, Any]:
        found: dict[str, Any] = await self._json("GET", "/openapi.json", None)
        return found

    async def ready(self, *, timeout_s: float = ASK_S) -> None:
        """Raises while it starts."""
        await self._call("GET", "/model_info", None, timeout_s)

    async def _update(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Loads weights. Never aborts what runs, which a server may do by itself where it is not told."""
        return await self._told(path, {**body, "abort_all_requests": False}, UPDATE_S)

    async def _told(self, path: str, body: Mapping[str, Any], timeout_s: float = ASK_S) -> dict[str, Any]:
        """An order. Some answer 200 with success = false."""
        answer = await self._json("POST", path, body, timeout_s)
        if not isinstance(answer, dict):
            return {}
        if answer.get("success") is False:
            raise ServerRefused(_shortened(str(answer.get("message", answer))), 200)
        return answer

    async def _json(self, method: str, path: str, body: object, timeout_s: float = ASK_S) -> Any:
        data = await self._call(method, path, body, timeout_s)
        try:
            return msgspec.json.decode(data) if data else {}
        except msgspec.DecodeError as error:
            raise ServerBroken(f"{self._url}{path} answered what is not JSON: {error}") from error

    async def _post(self, path: str, body: object, timeout_s: float) -> bytes:
        return await self._call("POST", path, body, timeout_s)

    async def _call(self, method: str, path: str, body: object, timeout_s: float) -> bytes:
        """The body of a 2xx answer."""
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if data is None else {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._opened().request(
                method, self._url + path, data=data, headers=headers, timeout=timeout
            ) as response:
                answer = await response.read()
        except TimeoutError as error:
            raise ServerGone(f"{self._url}{path} did not answer within {timeout_s:.3g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerGone(f"{self._url}{path} cannot be reached: {error or type(error).__name__}") from error
        if response.status >= 500:
            raise ServerBroken(f"{self._url}{path} failed with {response.status}: {_message(answer)}")
        if response.status >= 400:
            raise ServerRefused(_message(answer), response.status)
        return answer

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No limit here: how many requests are open at a server is decided where its figures are known.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session

    def _decoded(self, decoder: msgspec.json.Decoder[T], data: bytes) -> T:
        try:
            return decoder.decode(data)
        except msgspec.DecodeError as error:
            raise ServerBroken(f"{self._url} answered what is not understood: {error}") from error


def _message(answer: bytes) -> str:
    """The server's own words: {"error": {"message"}}, {"message"}, {"detail"}, or text."""
    try:
        found = msgspec.json.decode(answer)
    except msgspec.DecodeError:
        return _shortened(answer.decode("utf-8", "replace")) or "no text"
    while isinstance(found, dict):
        inner = next((found[name] for name in ("error", "message", "detail") if found.get(name)), None)
        if inner is None:
            break
        found = inner
    return _shortened(str(found))


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}…"
