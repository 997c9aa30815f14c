"""A server over HTTP: one session, a deadline for each call, and three kinds of failure."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import msgspec

from headrace.errors import EngineError

ASK_S = 30.0
"""For what a server answers out of hand; its scheduler may be in the middle of a long prefill."""
UPDATE_S = 600.0
"""For orders around an update; the callers have deadlines of their own, by the size."""
REQUEST_S = 3600.0
"""For one completion; whether the server goes on is watched meanwhile."""
KEEP_ALIVE_S = 2.0
"""Servers close an idle connection after 5 s: one that is about to be closed must not be taken for a request."""
MOST_BYTES = 256 << 20
"""Of one answer. A million tokens with their log-probs are less."""
_MOST_TEXT = 500
_UNREADABLE = (msgspec.DecodeError, RecursionError)
"""What decoding raises; the latter for what is nested too deep."""

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


class HttpClient:
    """For one event loop. Every call raises ServerGone, ServerBroken or ServerRefused."""

    def __init__(self, url: str, key: str = "") -> None:
        """`key` is sent as a bearer token, where there is one."""
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def url(self) -> str:
        return self._url

    async def close(self) -> None:
        """Requests that are open, or come later, end with ServerGone. Idempotent."""
        self._closed = True
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def openapi(self) -> dict[str, Any]:
        """What the server says of its routes."""
        return await self._object("GET", "/openapi.json", None)

    async def _object(self, method: str, path: str, body: object, timeout_s: float = ASK_S) -> dict[str, Any]:
        """Raises ServerBroken for any other JSON."""
        found = await self._json(method, path, body, timeout_s)
        if not isinstance(found, dict):
            raise ServerBroken(f"{self._url}{path} answered {type(found).__name__} where an object belongs")
        return found

    async def _json(self, method: str, path: str, body: object, timeout_s: float = ASK_S) -> Any:
        data = await self._call(method, path, body, timeout_s)
        try:
            return msgspec.json.decode(data) if data else {}
        except _UNREADABLE as error:
            raise ServerBroken(f"{self._url}{path} answered what is not JSON: {error}") from error

    async def _post(self, path: str, body: object, timeout_s: float) -> bytes:
        return await self._call("POST", path, body, timeout_s)

    async def _call(self, method: str, path: str, body: object, timeout_s: float) -> bytes:
        """The body of a 2xx answer."""
        if self._closed:
            raise ServerGone(f"{self._url}{path} is not asked any more: the connection was closed")
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if data is None else {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._opened().request(
                method, self._url + path, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                answer = await self._read(response, path)
        except TimeoutError as error:
            raise ServerGone(f"{self._url}{path} did not answer within {timeout_s:.3g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerGone(f"{self._url}{path} cannot be reached: {error or type(error).__name__}") from error
        if response.status >= 500:
            raise ServerBroken(f"{self._url}{path} failed with {response.status}: {_message(answer)}")
        if response.status >= 400:
            raise ServerRefused(_message(answer), response.status)
        if response.status >= 300:
            place = shortened(response.headers.get("Location", "nowhere"))
            raise ServerBroken(f"{self._url}{path} redirects ({response.status}) to {place}; give the URL that answers")
        return answer

    async def _read(self, response: aiohttp.ClientResponse, path: str) -> bytes:
        body = bytearray()
        async for part in response.content.iter_chunked(1 << 18):
            body += part
            if len(body) > MOST_BYTES:
                raise ServerBroken(f"{self._url}{path} answers more than {MOST_BYTES >> 20} MB")
        return bytes(body)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No limit here: how many requests are open at a server is decided where its figures are known.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session

    def _decoded(self, decoder: msgspec.json.Decoder[T], data: bytes) -> T:
        try:
            return decoder.decode(data)
        except _UNREADABLE as error:
            raise ServerBroken(f"{self._url} answered what is not understood: {error}") from error


def shortened(text: str) -> str:
    """For a message: one line, of bounded length."""
    text = " ".join(text.split())
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}…"


def _message(answer: bytes) -> str:
    """The server's own words: {"error": {"message"}}, {"message"}, {"detail"}, or text."""
    try:
        found = msgspec.json.decode(answer)
    except _UNREADABLE:
        return shortened(answer.decode("utf-8", "replace")) or "no text"
    while isinstance(found, dict):
        inner = next((found[name] for name in ("error", "message", "detail") if found.get(name)), None)
        if inner is None:
            break
        found = inner
    return shortened(str(found))
